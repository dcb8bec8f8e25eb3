"""Sampling of a video's frames; pure functions, standard library only.

The counts and indices follow transformers' Qwen2-VL video processor (``sample_frames``), but are
exact: its float32 ``arange`` is sometimes off by one frame, or adds an odd last frame.
"""

import bisect
import math
from collections.abc import Sequence

from hippo.errors import InvalidRequestError
from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits, check_room, fit_frames, fit_size
from hippo.types import FramePlan, MediaKind

MAX_FPS = 240.0


def resolve_plan(
    plan: FramePlan,
    limits: DecodeLimits,
    frames: FrameLimits | None = None,
    kind: MediaKind = MediaKind.VIDEO,
) -> FramePlan:
    """Fills in the model's defaults and limits. The fields that do not concern the kind are 0;
    ``max_pixels`` 0: the stored size.

    ``num_frames`` is 0 if ``fps`` decides. ``max_visual_tokens`` counts this video alone. Raises
    InvalidRequestError for a field out of range, and ContextLengthError for less room than a frame
    takes.
    """
    frames = frames or FrameLimits()
    _check_range(plan, limits, frames)
    least, most = frames.image_pixels if kind is MediaKind.IMAGE else frames.video_pixels
    most = min(plan.max_pixels or most, most)
    if most and plan.min_pixels > most:
        raise InvalidRequestError(
            f"min_pixels is {plan.min_pixels}, but a frame or image has at most {most} pixels",
            param="min_pixels",
        )
    least = min(plan.min_pixels or least, most)
    if kind is MediaKind.IMAGE:
        return FramePlan(min_pixels=least, max_pixels=most, background=plan.background)
    # A video has at least the frames of one grid, as with num_frames.
    max_frames = max(plan.max_frames or limits.max_frames, frames.frame_multiple)
    num_frames = plan.num_frames
    if num_frames:
        grids = max(round(num_frames / frames.frame_multiple), 1)
        max_frames = min(max_frames, grids * frames.frame_multiple)
    elif frames.num_frames and not plan.fps:
        num_frames = max(frames.num_frames, plan.min_frames)
    tokens = [count for count in (plan.max_visual_tokens, frames.max_video_tokens) if count]
    return FramePlan(
        fps=plan.fps or frames.fps,
        min_frames=plan.min_frames or min(frames.min_frames, max_frames),
        max_frames=max_frames,
        num_frames=max_frames if plan.num_frames else min(num_frames, max_frames),
        min_pixels=least,
        max_pixels=most,
        max_visual_tokens=min(tokens, default=0),
    )


def _check_range(plan: FramePlan, limits: DecodeLimits, frames: FrameLimits) -> None:
    if plan.fps != 0.0 and not 0.0 < plan.fps <= MAX_FPS:
        raise InvalidRequestError(
            f"fps is {plan.fps}; it must be greater than 0 and at most {MAX_FPS:g}", param="fps"
        )
    for name in ("max_frames", "min_frames", "num_frames"):
        value = getattr(plan, name)
        if value != 0 and not 1 <= value <= limits.max_frames:
            raise InvalidRequestError(
                f"{name} is {value}; this service takes 1 to {limits.max_frames} frames of a video",
                param=name,
            )
    max_frames = plan.max_frames or limits.max_frames
    if plan.min_frames > max_frames:
        raise InvalidRequestError(
            f"min_frames is {plan.min_frames}, more than max_frames, {max_frames}",
            param="min_frames",
        )
    if plan.max_visual_tokens:
        check_room(plan.max_visual_tokens, frames.fixed_tokens)
    if frames.fixed_size is None:
        return
    height, width = frames.fixed_size
    is_too_few = 0 < plan.max_pixels < height * width
    if is_too_few or plan.min_pixels > height * width:
        name = "max_pixels" if is_too_few else "min_pixels"
        raise InvalidRequestError(
            f"this model looks at every frame at {width} x {height} pixels: {name} cannot be "
            f"{getattr(plan, name)}; leave it out, or change the number of frames",
            param=name,
        )


def count_frames(total: int, duration_s: float, plan: FramePlan, multiple: int = 2) -> int:
    """Returns the number of frames of a resolved plan: a multiple of ``multiple`` that is at least
    ``multiple``, else up to ``total``."""
    if plan.num_frames:
        wanted: float = min(plan.num_frames, total)
    else:
        most = _floor(min(plan.max_frames, total), multiple)
        wanted = min(max(duration_s * plan.fps, plan.min_frames), most, total)
    return max(_floor(wanted, multiple), multiple)


def expected_frames(
    seconds: float, height: int, width: int, plan: FramePlan, limits: FrameLimits
) -> tuple[int, tuple[int, int], int]:
    """Returns how many frames a video becomes, their height and width, and their visual tokens.

    The video has at least 24 frames a second; ``plan`` is resolved. Raises as ``fit_size``.
    """
    total = max(math.ceil(24 * seconds), 1)
    count = count_frames(total, seconds, plan, limits.frame_multiple)
    count = fit_frames(count, height, width, plan, limits)
    rows, columns = size = fit_size(count, height, width, plan, limits)
    if limits.fixed_size is not None:
        return count, size, count * limits.fixed_tokens
    grids = math.ceil(count / limits.frame_multiple)
    return count, size, grids * rows * columns // limits.side_multiple**2


def sample_frames(seconds: Sequence[float], duration_s: float, num_frames: int) -> list[int]:
    """Returns evenly spaced frame indices, ascending; a single frame is used as often as needed.

    ``seconds`` are the presentation times of all frames, ascending from 0. At a constant frame
    rate the indices are evenly spaced, otherwise the times at which the frames are on screen.
    """
    interval = duration_s / len(seconds)
    # At a constant rate each frame is within half an interval of even spacing.
    if all(abs(time - i * interval) <= 0.5 * interval for i, time in enumerate(seconds)):
        return spaced(len(seconds), num_frames)
    times = (place * duration_s / num_frames for place in range(num_frames))
    return [bisect.bisect_right(seconds, time + 1e-9) - 1 for time in times]


def spaced(total: int, num_frames: int) -> list[int]:
    """Returns ``num_frames`` evenly spaced indices of ``total``, from 0."""
    return [place * total // num_frames for place in range(num_frames)]


def _floor(count: float, multiple: int) -> int:
    return math.floor(count / multiple) * multiple
