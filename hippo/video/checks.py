"""What a decoder refuses: each of the operator's limits, with its message."""

from __future__ import annotations

from hippo.errors import MediaError
from hippo.video.limits import DecodeLimits


def check_size(width: int, height: int, limits: DecodeLimits, what: str) -> None:
    """Raises MediaError for a frame or image (``what``) without pixels or with too many."""
    if width <= 0 or height <= 0:
        raise MediaError(
            f"the size of {what} cannot be read: it is damaged, or far above the "
            f"{limits.max_pixels:,} pixels allowed"
        )
    if width * height > limits.max_pixels:
        raise MediaError(
            f"{what} has {width} x {height} pixels; at most {limits.max_pixels:,} are allowed: "
            "scale it down"
        )


def check_memory(num_frames: int, width: int, height: int, limits: DecodeLimits) -> None:
    """Raises MediaError for frames that do not fit into the memory allowed."""
    size = num_frames * width * height * 3
    if size > limits.max_memory_bytes:
        raise MediaError(
            f"{num_frames} frames of {width} x {height} pixels need {size:,} bytes; at most "
            f"{limits.max_memory_bytes:,} are allowed: ask for fewer frames or scale the video down"
        )


def check_duration(duration_s: float, limits: DecodeLimits) -> None:
    """Raises MediaError for a video that lasts too long."""
    if duration_s > limits.max_duration_s:
        raise MediaError(
            f"the video lasts {duration_s:.1f} s; at most {limits.max_duration_s:g} s are allowed: "
            "send a shorter part of it"
        )


def check_streams(num_streams: int, limits: DecodeLimits) -> None:
    """Raises MediaError for more tracks than allowed."""
    if num_streams > limits.max_streams:
        raise MediaError(
            f"the file has {num_streams} tracks; at most {limits.max_streams} are allowed: send "
            "the video's track alone"
        )


def check_stored_frames(num_frames: int, limits: DecodeLimits) -> None:
    """Raises MediaError for more frames in the file than allowed, looked at or not."""
    if num_frames > limits.max_stored_frames:
        raise MediaError(
            f"the video has more than the {limits.max_stored_frames:,} frames allowed: send a "
            "shorter part of it"
        )


def check_rate(num_frames: int, duration_s: float, limits: DecodeLimits) -> None:
    """Raises MediaError for a duration that is none, or more frames a second than allowed."""
    if not duration_s > 0:
        raise MediaError("the video lasts 0 s: its times are damaged; encode it again")
    if num_frames > 1 and num_frames > duration_s * limits.max_stored_fps:
        raise MediaError(
            f"the video has {num_frames / duration_s:,.0f} frames a second; at most "
            f"{limits.max_stored_fps:g} are allowed: encode it at a lower rate"
        )
