"""Resizes the planned frames of one item into the memory that the worker returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hippo.types import FramePlan
from hippo.video.limits import DecodeLimits
from hippo.video.resizing import FrameLimits

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Allocate = Callable[[int, int, int], Pixels]  # (num_frames, height, width) -> [..., 3]


@dataclass(frozen=True, slots=True)
class Frames:
    """RGB frames (uint8 ``[num_frames, height, width, 3]``), their times in seconds, and what of
    the file could not be used."""

    pixels: Pixels
    seconds: tuple[float, ...]
    sampled_fps: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Canvas:
    """What to decode of one item; ``plan`` is resolved (hippo.video.sampling)."""

    plan: FramePlan
    limits: DecodeLimits
    frame_limits: FrameLimits
    allocate: Allocate
    num_threads: int = 1

    def allocate_frames(self, num_frames: int, size: tuple[int, int]) -> Pixels:
        """Returns memory for frames of a size (height, width); raises MediaError if too large."""
        height, width = size
        self.limits.check_memory(num_frames, width, height)
        return self.allocate(num_frames, height, width)

    def draw(self, rgb: Pixels, target: Pixels) -> None:
        """Resizes a frame (``[height, width, 3]``) to the size of ``target``, and writes it there.

        A value differs by at most 2 from that of transformers' processors, which resize with torch.
        """
        if rgb.shape != target.shape:
            from PIL import Image

            height, width, _ = target.shape
            filter_ = Image.Resampling(self.frame_limits.resample)
            rgb = np.asarray(Image.fromarray(rgb).resize((width, height), filter_))
        target[:] = rgb
