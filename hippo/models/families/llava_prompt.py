"""Prompts of the LLaVA-OneVision family: the pooled video grid, and tiles of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hippo.media.resizing import FrameLimits
from hippo.models.families.pixels import byte_options
from hippo.models.interface.base import DecodedMedia
from hippo.models.prompts.builder import PromptBuilder
from hippo.models.prompts.layout import Layout, MediaMark
from hippo.types import MediaKind

_NUM_FRAMES = 32  # of the family's training and evaluation


class LlavaPromptBuilder(PromptBuilder):
    """See PromptBuilder.

    A video consists of its frames' pooled grids, one after the other, and one newline token, which
    is not prunable:

        video   |- frame 0, row by row -|- frame 1 -| ... |- last frame -|newline|
                ^ visual_indices ................................ end ^

    A single image is cut into tiles and several images are not, as in the family's training. The
    grid of an image is its height, its width, and whether it is cut.
    """

    def __init__(self, processor: Any, *, max_context_length: int) -> None:
        # Pooling halves the sides of the tower's square grid, rounding up.
        self._side = math.ceil(math.isqrt(processor.num_image_tokens) / 2)
        video = processor.video_processor
        size = dict(video.size)  # LlavaTower refuses another one than the tower's
        limits = FrameLimits(
            num_frames=_NUM_FRAMES,
            frame_multiple=1,
            fixed_size=(size.get("height", 0), size.get("width", 0)),
            fixed_tokens=self._side**2,
            resample=int(video.resample),
        )
        image_token, video_token = processor.image_token, processor.video_token
        marks = {
            MediaKind.IMAGE: MediaMark(image_token, image_token, processor.image_token_id),
            MediaKind.VIDEO: MediaMark(video_token, video_token, processor.video_token_id),
        }
        super().__init__(processor, limits, marks, max_context_length=max_context_length)

    def lay_out(self, media: Sequence[DecodedMedia]) -> Sequence[Layout]:
        """See PromptBuilder.lay_out."""
        images = iter(self._lay_out_images([i for i in media if i.kind is MediaKind.IMAGE]))
        return [
            self._lay_out_video(item) if item.kind is MediaKind.VIDEO else next(images)
            for item in media
        ]

    def _lay_out_video(self, item: DecodedMedia) -> Layout:
        grid = (item.frames.shape[0], self._side, self._side)
        pixels = item.frames.permute(0, 3, 1, 2).contiguous()
        num_tokens = math.prod(grid) + 1
        return Layout(item.kind, (num_tokens,), pixels, (), grid, num_separators=1)

    def _lay_out_images(self, items: Sequence[DecodedMedia]) -> list[Layout]:
        if not items:
            return []
        own = self._processor.image_processor
        pictures = [item.frames[0].permute(2, 0, 1) for item in items]
        # Nested: one list of images for each prompt.
        inputs = own([pictures], return_tensors="pt", **byte_options(own))
        token = self._processor.image_token
        return [
            Layout(
                item.kind,
                (self._processor.replace_image_token(inputs, index).count(token),),
                inputs["pixel_values"][index],
                (*inputs["image_sizes"][index].tolist(), len(items) == 1),
            )
            for index, item in enumerate(items)
        ]
