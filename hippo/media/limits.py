"""The operator's limits for one media item; standard library only."""

from dataclasses import dataclass

from hippo.errors import MediaError

MAX_ASPECT_RATIO = 200
"""The longest side allowed, as a multiple of the shorter side, as in qwen-vl-utils: no family's
resizing leaves anything of a narrower frame."""

NUM_WORKERS = 3
"""Worker processes of a service: two for any item, so that nobody waits for another client's, and
one that is kept for cheap items."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Upper bounds for one item; exceeding one of them is a MediaError."""

    max_frames: int = 768  # after sampling
    max_pixels: int = 7680 * 4320  # pixels of a stored frame
    max_duration_s: float = 4 * 3600.0
    max_streams: int = 32  # tracks of the file, of any kind
    max_stored_frames: int = 1_000_000  # in the file
    max_stored_fps: float = 1000.0  # mean rate in the file
    max_bytes: int = 256 << 20  # size of the compressed file
    timeout_s: float = 120.0  # wall time in the worker
    max_memory_bytes: int = 2048 << 20  # what the worker may take after its start

    def check_bytes(self, num_bytes: int, kind: str) -> None:
        """Refuses a file of the ``kind`` that is empty or too large."""
        if not num_bytes:
            raise MediaError(f"the {kind} is empty (0 bytes)")
        if num_bytes > self.max_bytes:
            raise MediaError(
                f"the {kind} has {num_bytes:,} bytes; at most {self.max_bytes:,} are allowed: "
                "send a shorter or smaller one"
            )

    def check_size(self, width: int, height: int, what: str) -> None:
        """Refuses a frame or image (``what``) without pixels or with too many."""
        if width <= 0 or height <= 0:
            raise MediaError(
                f"the size of {what} cannot be read: it is damaged, or far above the "
                f"{self.max_pixels:,} pixels allowed"
            )
        if width * height > self.max_pixels:
            raise MediaError(
                f"{what} has {width} x {height} pixels; at most {self.max_pixels:,} are allowed: "
                "scale it down"
            )
        check_aspect(width, height, what)

    def check_memory(self, num_frames: int, width: int, height: int) -> None:
        size = num_frames * width * height * 3
        if size > self.max_memory_bytes:
            raise MediaError(
                f"{num_frames} frames of {width} x {height} pixels need {size:,} bytes; at most "
                f"{self.max_memory_bytes:,} are allowed: ask for fewer frames or scale the video "
                "down"
            )

    def check_times(self, num_frames: int, duration_s: float) -> None:
        """Refuses a video that lasts too long or 0 seconds, or of too many frames per second."""
        if duration_s > self.max_duration_s:
            raise MediaError(
                f"the video lasts {duration_s:.1f} s; at most {self.max_duration_s:g} s are "
                "allowed: send a shorter part of it"
            )
        if not duration_s > 0:
            raise MediaError("the video lasts 0 s: its times are damaged; encode it again")
        if num_frames > 1 and num_frames > duration_s * self.max_stored_fps:
            raise MediaError(
                f"the video has {num_frames / duration_s:,.0f} frames a second; at most "
                f"{self.max_stored_fps:g} are allowed: encode it at a lower rate"
            )

    def check_stored_frames(self, num_frames: int) -> None:
        if num_frames > self.max_stored_frames:
            raise MediaError(
                f"the video has more than the {self.max_stored_frames:,} frames allowed: send a "
                "shorter part of it"
            )


def check_aspect(width: int, height: int, what: str) -> None:
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise MediaError(
            f"{what} has {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} "
            "times the other"
        )
