"""What an operator allows one media item to cost; standard library only."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Upper bounds for one item; exceeding any of them is a MediaError."""

    max_frames: int = 768  # looked at, after sampling
    max_pixels: int = 7680 * 4320  # of one frame as stored
    max_duration_s: float = 3600.0
    max_streams: int = 32  # tracks of the file, of any kind
    max_stored_frames: int = 500_000  # in the file, looked at or not
    max_stored_fps: float = 1000.0  # their mean rate
    max_bytes: int = 256 * _MIB  # of the compressed file
    timeout_s: float = 30.0  # wall time in the worker
    max_memory_bytes: int = 2048 * _MIB  # of the worker, beyond what it needs itself

    def __post_init__(self) -> None:
        """Refuses limits under which nothing could be decoded."""
        for name in (
            "max_pixels",
            "max_duration_s",
            "max_streams",
            "max_stored_frames",
            "max_stored_fps",
            "max_bytes",
            "timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        if self.max_frames < 2:
            raise ValueError(f"max_frames is {self.max_frames}; it must be at least 2")
        if self.max_memory_bytes < 64 * _MIB:
            raise ValueError(
                f"max_memory_bytes is {self.max_memory_bytes}; it must be at least {64 * _MIB}"
            )
