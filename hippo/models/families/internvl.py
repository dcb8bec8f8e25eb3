"""The InternVL3 and InternVL3.5 family: prompts, vision tower and description."""

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
from hippo.models.interface.base import DecodedMedia, VisualItem
from hippo.models.loading.pretrained import Pretrained
from hippo.models.prompts.builder import PromptBuilder
from hippo.models.prompts.layout import Layout, MediaMark
from hippo.types import MediaKind

_NUM_FRAMES = 32  # as in the family's training: max_num_frame
_MOST_FRAMES = 9999  # to whose number the text of a frame has room
_SETTINGS = {
    "downsample_ratio": 0.5,  # hippo.catalog.shapes counts on it
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}


class InternVLPromptBuilder(PromptBuilder):
    """See PromptBuilder; each frame of a video is a run behind its number.

        Frame1: <img> frame </img>
        Frame2: <img> frame </img>

    An image is cut into tiles, which a small copy of the whole image follows, between one <img>
    and one </img>.
    """

    def __init__(self, processor: Any, *, max_context_length: int) -> None:
        self._side = math.isqrt(processor.image_seq_length)
        self._start, self._end = processor.start_image_token, processor.end_image_token
        text = self._end + "\n" + self._frame_start(_MOST_FRAMES)
        num_tokens = self._side**2 + len(processor.tokenizer(text)["input_ids"])
        limits = picture_limits(processor, num_frames=_NUM_FRAMES, num_tokens=num_tokens)
        token, token_id = processor.image_token, processor.image_token_id
        marks = {
            MediaKind.IMAGE: MediaMark(token, token, token_id),
            MediaKind.VIDEO: MediaMark(processor.video_token, token, token_id),
        }
        super().__init__(processor, limits, marks, max_context_length=max_context_length)

    def _frame_start(self, number: int) -> str:
        return f"Frame{number}: {self._start}"

    def lay_out(self, media: Sequence[DecodedMedia]) -> Sequence[Layout]:
        """See PromptBuilder.lay_out."""
        return [
            self._lay_out_video(item) if item.kind is MediaKind.VIDEO else self._lay_out_image(item)
            for item in media
        ]

    def _lay_out_video(self, item: DecodedMedia) -> Layout:
        grid = (item.frames.shape[0], self._side, self._side)
        pieces: list[str | int] = []
        behind = ""
        for number in range(1, grid[0] + 1):
            pieces += [behind + self._frame_start(number), self._side**2]
            behind = self._end + "\n"
        pixels = item.frames.permute(0, 3, 1, 2).contiguous()
        return Layout(item.kind, (*pieces, self._end), pixels, (), grid)

    def _lay_out_image(self, item: DecodedMedia) -> Layout:
        own = self._processor.image_processor
        picture = item.frames[0].permute(2, 0, 1)
        # transformers' InternVLProcessor cuts images whatever crop_to_patches the file has.
        inputs = own([picture], crop_to_patches=True, return_tensors="pt", **byte_options(own))
        pixels = inputs["pixel_values"]
        num_tokens = pixels.shape[0] * self._side**2
        return Layout(item.kind, (self._start, num_tokens, self._end), pixels, ())


class InternVLTower(VisionTower):
    """See VisionTower; an item is a video's frames or an image's tiles, each of one size."""

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__(pretrained)
        patches, processor = (
            self.model.vision_tower.embeddings.patch_embeddings,
            pretrained.processor,
        )
        made = {"frames": processor.video_processor, "tiles": processor.image_processor}
        counted = ("image_seq_length", patches.num_patches // 4)
        check_pictures(pretrained, made, tuple(patches.image_size), counted)
        self._num_pictures = self.pictures_at_once(patches.num_patches)
        replace_products(self.model.vision_tower, pretrained.make_linear)
        replace_products(self.model.multi_modal_projector, pretrained.make_linear)

    def embed_item(self, item: VisualItem) -> Iterator[torch.Tensor]:
        """See VisionTower.embed_item; the tokens of a picture are ordered by row and column."""
        assert item.pixels is not None
        for part in torch.split(item.pixels, self._num_pictures):
            embedded = self.model.get_image_features(
                self.on_device(part, item.kind), return_dict=True
            )
            yield embedded.pooler_output.flatten(0, 1)


INTERNVL = Family(
    title="InternVL",
    architecture="InternVLForConditionalGeneration",
    num_axes=1,
    make_prompts=lambda pretrained: InternVLPromptBuilder(
        pretrained.processor, max_context_length=pretrained.info.max_context_length
    ),
    make_tower=InternVLTower,
    video_tokens='16 x 16 a frame, four patches each, behind the text "Frame1: "',
    check_configuration=require("InternVL", ("qwen2", "qwen3"), _SETTINGS),
)
