"""The LLaVA-OneVision family: its vision tower and its description."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hippo.catalog.sizes import VISION_FRAMES
from hippo.errors import ModelLoadError
from hippo.models.families.family import Family, VisionTower
from hippo.models.families.llava_prompt import LlavaPromptBuilder
from hippo.models.families.vision import replace_products
from hippo.models.interface.base import Prompt, VisualItem
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.loading.pretrained import Pretrained
from hippo.types import MediaKind


class LlavaTower(VisionTower):
    """See VisionTower; an item is a video's pooled grids, or an image with its tiles."""

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__(pretrained)
        _check_processor(pretrained)
        replace_products(self.model.vision_tower, pretrained.make_linear)
        replace_products(self.model.multi_modal_projector, pretrained.make_linear)

    def embed_item(self, item: VisualItem) -> Iterator[torch.Tensor]:
        """See VisionTower.embed_item."""
        assert item.pixels is not None
        if item.kind is MediaKind.VIDEO:
            for part in torch.split(item.pixels, VISION_FRAMES):
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


def _check_configuration(checkpoint: Checkpoint, plan: LoadPlan) -> None:
    """Raises ModelLoadError for an unsupported language model or feature selection, and for a plan
    that limits pixels."""
    plan.refuse_pixel_limits(checkpoint.name)
    language = (checkpoint.config.get("text_config") or {}).get("model_type", "qwen2")
    if language != "qwen2":
        raise ModelLoadError(
            f"{checkpoint.name}: its language model is a {language!r}; LLaVA-OneVision is "
            "supported with 'qwen2'"
        )
    strategy = checkpoint.config.get("vision_feature_select_strategy", "full")
    if strategy != "full":
        raise ModelLoadError(
            f"{checkpoint.name}: vision_feature_select_strategy {strategy!r} is not supported: "
            "a video's grid needs all patches ('full')"
        )


def _check_processor(pretrained: Pretrained) -> None:
    """Raises ModelLoadError if the processor's frames or token counts do not fit the tower."""
    vision, processor = pretrained.model.config.vision_config, pretrained.processor
    side = vision.image_size
    size = dict(processor.video_processor.size)
    if (size.get("height"), size.get("width")) != (side, side):
        raise ModelLoadError(
            f"{pretrained.info.name}: its processor makes frames of size {size}, its vision tower "
            f"takes {side} x {side} pixels"
        )
    num_patches = (side // vision.patch_size) ** 2
    if processor.num_image_tokens != num_patches:
        raise ModelLoadError(
            f"{pretrained.info.name}: its processor counts {processor.num_image_tokens} tokens a "
            f"frame (num_image_tokens), its vision tower gives {num_patches}"
        )


LLAVA_ONEVISION = Family(
    title="LLaVA-OneVision",
    architecture="LlavaOnevisionForConditionalGeneration",
    num_axes=1,
    make_prompts=lambda pretrained: LlavaPromptBuilder(
        pretrained.processor, max_context_length=pretrained.info.max_context_length
    ),
    make_tower=LlavaTower,
    video_tokens="14 x 14 a frame, pooled from 27 x 27, and one newline at the end of the video",
    check_configuration=_check_configuration,
)
