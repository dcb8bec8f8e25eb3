"""Cuts frames into the patches of a Qwen vision tower (Qwen2-VL, Qwen2.5-VL, Qwen3-VL).

The result is bit-identical to that of transformers' processors and takes a fraction of the time.
The patches stay bytes, which hippo.models.families.pixels normalises on the tower's device.
"""

from __future__ import annotations

from typing import Any

import torch


class PatchCutter:
    """Cuts frames as a given image or video processor of transformers does; usable from any
    thread."""

    def __init__(self, processor: Any) -> None:
        self.merge_size = int(processor.merge_size)
        self._patch = int(processor.patch_size)
        self._depth = int(processor.temporal_patch_size)

    def cut_frames(self, pixels: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Returns the patches (uint8 ``[num_patches, values]``) of ``pixels`` (uint8
        ``[num_frames, height, width, 3]``, resized), and their grid in patches.
        """
        num_frames, height, width, _ = pixels.shape
        if padding := -num_frames % self._depth:
            pixels = torch.cat((pixels, pixels[-1:].expand(padding, -1, -1, -1)))
        grid = (pixels.shape[0] // self._depth, height // self._patch, width // self._patch)
        blocks = pixels.reshape(
            grid[0],
            self._depth,
            grid[1] // self.merge_size,
            self.merge_size,
            self._patch,
            grid[2] // self.merge_size,
            self.merge_size,
            self._patch,
            3,
        )
        # The order is: frames, merged patches, patches in a merged patch; a patch is
        # [channels, frames, rows, columns].
        ordered = blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        values = 3 * self._depth * self._patch**2
        return ordered.reshape(grid[0] * grid[1] * grid[2], values), grid
