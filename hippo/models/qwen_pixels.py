"""Cuts a video's frames into the patches of a Qwen2.5-VL vision tower.

The result is bit-identical to that of transformers' video processor and takes a fraction of the
time. The patches stay bytes, which hippo.models.pixels normalises on the tower's device.
"""

from __future__ import annotations

from typing import Any

import torch

from hippo.models.pixels import PixelScale


class VideoPatches:
    """Cuts frames as a given ``video_processor`` of transformers does; usable from any thread."""

    def __init__(self, video_processor: Any) -> None:
        self._processor = video_processor
        self._patch = int(video_processor.patch_size)
        self._merge = int(video_processor.merge_size)
        self._depth = int(video_processor.temporal_patch_size)

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
            grid[1] // self._merge,
            self._merge,
            self._patch,
            grid[2] // self._merge,
            self._merge,
            self._patch,
            3,
        )
        # The order is: frames, merged patches, patches in a merged patch; a patch is
        # [channels, frames, rows, columns].
        ordered = blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        values = 3 * self._depth * self._patch**2
        return ordered.reshape(grid[0] * grid[1] * grid[2], values), grid

    def matches_processor(self) -> bool:
        """Whether the processor and this class give the same patches for a test clip."""
        processor = self._processor
        if not (processor.do_rescale and processor.do_normalize):
            return False
        side = self._patch * self._merge
        values = torch.arange((self._depth + 1) * 3 * side * 2 * side * 3)
        frames = (values * 2654435761 >> 7).to(torch.uint8).view(self._depth + 1, 3 * side, -1, 3)
        patches, grid = self.cut_frames(frames)
        expected = processor(
            videos=[frames.permute(0, 3, 1, 2)],
            do_sample_frames=False,
            do_resize=False,
            return_tensors="pt",
        )
        normalised = PixelScale(processor).normalise(patches)
        return torch.equal(normalised, expected["pixel_values_videos"]) and (
            expected["video_grid_thw"].tolist() == [list(grid)]
        )


def fast_patches(video_processor: Any) -> VideoPatches | None:
    """Returns VideoPatches that replaces the processor; None if the results would differ."""
    if type(video_processor).__name__ != "Qwen2VLVideoProcessor":
        return None
    patches = VideoPatches(video_processor)
    return patches if patches.matches_processor() else None
