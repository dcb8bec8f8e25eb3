"""Sampling of a video's frames; pure functions, standard library only.

The counts and indices follow transformers' Qwen2-VL video processor (``sample_frames``), but are
exact: its float32 ``arange`` is sometimes off by one frame, or adds an odd last frame.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace

from hippo.errors import InvalidRequestError
from hippo.types import FramePlan
from hippo.video.limits import DecodeLimits

DEFAULT_FPS = 2.0
DEFAULT_MIN_FRAMES = 4
TEMPORAL_PATCH_SIZE = 2  # the number of frames is a multiple of it
MAX_FPS = 240.0


def resolve_plan(plan: FramePlan, limits: DecodeLimits) -> FramePlan:
    """Fills in defaults; raises InvalidRequestError for a field out of range."""
    if plan.fps != 0.0 and not 0.0 < plan.fps <= MAX_FPS:
        raise InvalidRequestError(
            f"fps is {plan.fps}; it must be greater than 0 and at most {MAX_FPS:g}", param="fps"
        )
    for name in ("max_frames", "min_frames"):
        value = getattr(plan, name)
        if value != 0 and not TEMPORAL_PATCH_SIZE <= value <= limits.max_frames:
            raise InvalidRequestError(
                f"{name} is {value}; this service takes {TEMPORAL_PATCH_SIZE} to "
                f"{limits.max_frames} frames of a video",
                param=name,
            )
    max_frames = plan.max_frames or limits.max_frames
    if plan.min_frames > max_frames:
        raise InvalidRequestError(
            f"min_frames is {plan.min_frames}, more than max_frames, {max_frames}",
            param="min_frames",
        )
    return replace(
        plan,
        fps=plan.fps or DEFAULT_FPS,
        min_frames=plan.min_frames or min(DEFAULT_MIN_FRAMES, max_frames),
        max_frames=max_frames,
    )


def count_frames(total: int, duration_s: float, plan: FramePlan) -> int:
    """Returns the number of frames of a resolved plan: even, at least 2, else up to ``total``."""
    most = _floor_even(min(plan.max_frames, total))
    wanted = min(max(duration_s * plan.fps, plan.min_frames), most, total)
    return max(_floor_even(wanted), TEMPORAL_PATCH_SIZE)


def sample_frames(seconds: Sequence[float], duration_s: float, plan: FramePlan) -> list[int]:
    """Returns evenly spaced frame indices, ascending; a single frame is used twice.

    ``seconds`` are the presentation times of all frames, ascending from 0. At a constant frame
    rate the indices are evenly spaced, otherwise the times at which the frames are on screen.
    """
    total = len(seconds)
    num_frames = count_frames(total, duration_s, plan)
    if has_constant_rate(seconds, duration_s):
        return [place * total // num_frames for place in range(num_frames)]
    times = (place * duration_s / num_frames for place in range(num_frames))
    return [bisect.bisect_right(seconds, time + 1e-9) - 1 for time in times]


def has_constant_rate(seconds: Sequence[float], duration_s: float) -> bool:
    """Whether each frame is within half a frame interval of even spacing."""
    interval = duration_s / len(seconds)
    return all(abs(time - i * interval) <= 0.5 * interval for i, time in enumerate(seconds))


def _floor_even(count: float) -> int:
    return math.floor(count / TEMPORAL_PATCH_SIZE) * TEMPORAL_PATCH_SIZE
