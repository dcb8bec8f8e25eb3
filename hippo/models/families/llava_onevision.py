"""The LLaVA-OneVision family: prompts with a pooled video grid and tiles of images, and its vision
tower."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hippo.models.families.family import (
    Family,
    VisionTower,
    check_pictures,
    picture_limits,
    require,
)
from hippo.models.families.pixels import byte_options
from hippo.models.families.vision import replace_products
from hippo.models.interface.base import DecodedMedia, Prompt, VisualItem
from hippo.models.loading.pretrained import Pretrained
from hippo.models.prompts.builder import PromptBuilder
from hippo.models.prompts.layout import Layout, MediaMark
from hippo.types import MediaKind

_NUM_FRAMES = 32  # as in the family's training and evaluation


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
        limits = picture_limits(processor, num_frames=_NUM_FRAMES, num_tokens=self._side**2)
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


class LlavaTower(VisionTower):
    """See VisionTower; an item is a video's pooled grids, or an image with its tiles."""

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__(pretrained)
        vision, processor = pretrained.model.config.vision_config, pretrained.processor
        side = vision.image_size
        num_patches = (side // vision.patch_size) ** 2
        counted = ("num_image_tokens", num_patches)
        self._num_pictures = self.pictures_at_once(num_patches)
        check_pictures(pretrained, {"frames": processor.video_processor}, (side, side), counted)
        replace_products(self.model.vision_tower, pretrained.make_linear)
        replace_products(self.model.multi_modal_projector, pretrained.make_linear)

    def embed_item(self, item: VisualItem) -> Iterator[torch.Tensor]:
        """See VisionTower.embed_item."""
        assert item.pixels is not None
        if item.kind is MediaKind.VIDEO:
            for part in torch.split(item.pixels, self._num_pictures):
                yield self._embed_frames(self.on_device(part, item.kind))
            return
        height, width, is_tiled = item.grid
        (features,) = self.model.get_image_features(
            self.on_device(item.pixels[None], item.kind),
            torch.tensor([[height, width]]),
            batch_num_images=torch.tensor([1 if is_tiled else 2]),
            return_dict=True,
        ).pooler_output
        yield features

    def _embed_frames(self, frames: torch.Tensor) -> torch.Tensor:
        embedded = self.model.get_video_features(frames[None], return_dict=True)
        features: torch.Tensor = embedded.pooler_output[0, :-1]  # without the newline at the end
        return features

    def embed_others(self, prompt: Prompt) -> Sequence[torch.Tensor]:
        """See VisionTower.embed_others: one newline for each video."""
        return (self.model.image_newline.expand(len(prompt.visual_grids), -1),)


LLAVA_ONEVISION = Family(
    title="LLaVA-OneVision",
    architecture="LlavaOnevisionForConditionalGeneration",
    num_axes=1,
    make_prompts=lambda pretrained: LlavaPromptBuilder(
        pretrained.processor, max_context_length=pretrained.info.max_context_length
    ),
    make_tower=LlavaTower,
    video_tokens="14 x 14 a frame, pooled from 27 x 27, and one newline at the end of the video",
    # A video's grid needs all patches.
    check_configuration=require(
        "LLaVA-OneVision", ("qwen2",), {"vision_feature_select_strategy": "full"}
    ),
)
