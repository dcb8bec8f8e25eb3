"""Resizes frames that the media decoder has not resized, such as a warm-up's or a test's."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits, fit_image, fit_size
from hippo.media.sampling import resolve_plan
from hippo.models.interface.base import DecodedMedia
from hippo.types import FramePlan, MediaKind


def resized(item: DecodedMedia, plan: FramePlan, limits: FrameLimits) -> DecodedMedia:
    """Returns the item with its frames in the size that the model takes, to the last bit as
    transformers' processors resize them.

    Raises InvalidRequestError for a plan out of range, and MediaError for too narrow a frame.
    """
    if item.is_resized:
        return item
    resolved = resolve_plan(plan, DecodeLimits(), limits, item.kind)
    num_frames, height, width, _ = item.frames.shape
    if item.kind is MediaKind.IMAGE:
        size = fit_image(height, width, resolved, limits)
    else:
        size = fit_size(num_frames, height, width, resolved, limits)
    frames = item.frames
    if size != (height, width):
        functional: Any = importlib.import_module("torchvision.transforms.v2.functional")
        utils: Any = importlib.import_module("transformers.image_utils")
        interpolation = utils.pil_torch_interpolation_mapping[limits.resample]
        channels_first = functional.resize(
            frames.permute(0, 3, 1, 2), list(size), interpolation=interpolation, antialias=True
        )
        frames = channels_first.permute(0, 2, 3, 1)
    return dataclasses.replace(item, frames=frames, is_resized=True)
