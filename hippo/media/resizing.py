"""What a model takes of videos and images, and the frames and sizes that follow; standard library.

The sizes follow qwen-vl-utils (``smart_resize`` and ``fetch_video``), which Qwen2.5-VL was made
with: both sides are multiples of a number, and the frames of a video share a budget of pixels.
"""

import math
from dataclasses import dataclass

from hippo.errors import ContextLengthError
from hippo.media.limits import check_aspect
from hippo.types import FramePlan

_LEAST_RANGE = 1.05  # qwen-vl-utils: a share is at least the least size times this


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """A model family's defaults and limits; the default values keep the stored size.

    A family has either ``fixed_size`` or a ``side_multiple`` with limits on the pixels."""

    fps: float = 2.0  # sampled if the request does not say otherwise
    num_frames: int = 0  # evenly spaced frames sampled by default; 0: ``fps`` decides
    min_frames: int = 4  # with ``fps``
    frame_multiple: int = 2  # number of frames of one grid of tokens
    side_multiple: int = 1  # both sides are multiples of it; a token is a square of this side
    grid_text_tokens: int = 0  # most text tokens that accompany a grid of tokens
    fixed_size: tuple[int, int] | None = None  # (height, width) of each frame of a video
    fixed_tokens: int = 0  # tokens of a frame of ``fixed_size``, with the text before it
    video_pixels: tuple[int, int] = (0, 0)  # least and most of a frame; most 0: the stored size
    image_pixels: tuple[int, int] = (0, 0)
    max_video_tokens: int = 0  # most tokens of a video; 0: no limit
    resample: int = 3  # Pillow's number of the filter; 3: bicubic
    as_shown: bool = False  # the operator's: see hippo.video.as_shown


def check_room(budget: int, least_tokens: int) -> None:
    """Raises ContextLengthError if a video that takes at least ``least_tokens`` visual tokens has
    only room for ``budget``."""
    if budget < least_tokens:
        raise ContextLengthError(
            f"there is room for at most {budget} visual tokens of a video, and the fewest and "
            f"smallest frames take {least_tokens}: shorten the text or the answer (max_tokens), "
            "send fewer videos, lower min_pixels if it is set, or start the services with a larger "
            "--max-context-length and the gateway with a larger --max-visual-tokens",
            param="messages",
        )


def fit_frames(
    num_frames: int, height: int, width: int, plan: FramePlan, limits: FrameLimits
) -> int:
    """Returns how many of ``num_frames`` frames of the stored size fit into the plan's
    ``max_visual_tokens``; ``plan`` is resolved (hippo.media.sampling)."""
    budget = plan.max_visual_tokens
    if not budget:
        return num_frames
    if limits.fixed_size is not None:
        return min(num_frames, budget // limits.fixed_tokens)
    if limits.side_multiple == 1:
        return num_frames
    rows, columns = fit_size(num_frames, height, width, plan, limits)
    tokens = rows * columns // limits.side_multiple**2 + limits.grid_text_tokens
    return min(num_frames, max(budget // tokens, 1) * limits.frame_multiple)


def fit_size(
    num_frames: int, height: int, width: int, plan: FramePlan, limits: FrameLimits
) -> tuple[int, int]:
    """Returns the height and width of each of ``num_frames`` frames of a video after resizing.

    Raises MediaError for too narrow a frame, and ContextLengthError if the least frames of the
    model or of the plan's ``min_pixels`` exceed ``max_visual_tokens``.
    """
    if limits.fixed_size is not None:
        return limits.fixed_size
    side = limits.side_multiple
    if side == 1 or not plan.max_visual_tokens:
        return fit_image(height, width, plan, limits)
    grids = math.ceil(num_frames / limits.frame_multiple)
    share = (plan.max_visual_tokens - grids * limits.grid_text_tokens) * side**2 // grids
    most = max(min(plan.max_pixels, share), int(plan.min_pixels * _LEAST_RANGE))
    size = smart_resize(height, width, side, plan.min_pixels, most)
    if grids == 1:  # fewer frames are not possible
        least_tokens = math.prod(size) // side**2 + limits.grid_text_tokens
        check_room(plan.max_visual_tokens, least_tokens)
    return size


def fit_image(height: int, width: int, plan: FramePlan, limits: FrameLimits) -> tuple[int, int]:
    """Returns the height and width of an image after resizing; raises as ``fit_size``."""
    if limits.side_multiple == 1:
        return height, width
    return smart_resize(height, width, limits.side_multiple, plan.min_pixels, plan.max_pixels)


def smart_resize(
    height: int, width: int, side: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Returns the size nearest to the stored one, in its aspect ratio, whose sides are multiples of
    ``side`` and whose pixels are within the limits, as qwen-vl-utils' function of this name."""
    check_aspect(width, height, "a frame or image")
    rows, columns = round(height / side) * side, round(width / side) * side
    if rows * columns > max_pixels:
        ratio = math.sqrt(height * width / max_pixels)
        rows = max(side, math.floor(height / ratio / side) * side)
        columns = max(side, math.floor(width / ratio / side) * side)
    elif rows * columns < min_pixels:
        ratio = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * ratio / side) * side
        columns = math.ceil(width * ratio / side) * side
    return max(rows, side), max(columns, side)
