"""LLaVA-OneVision: transformers' model and processor behind the project's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hippo.errors import ModelLoadError
from hippo.models.base import DecodedMedia, Prompt
from hippo.models.checkpoint import Checkpoint, Progress
from hippo.models.family import CachedModel
from hippo.models.llava_prompt import LlavaPromptBuilder, split_frames
from hippo.models.plan import LoadPlan
from hippo.models.pretrained import Pretrained, load_pretrained
from hippo.models.vision import replace_products
from hippo.sizes import VISION_FRAMES
from hippo.transfer import to_device
from hippo.types import ChatMessage, FramePlan

if TYPE_CHECKING:
    from hippo.parallel.shards import Shards


class LlavaOnevision(CachedModel):
    """A loaded LLaVA-OneVision checkpoint with its key-value cache; see VideoLanguageModel."""

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__(pretrained, num_axes=1)
        self._prompts = LlavaPromptBuilder(
            pretrained.processor, max_context_length=pretrained.info.max_context_length
        )

    def prepare(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """See VideoLanguageModel.prepare; frames have one size, which no plan can lower."""
        return self._prompts.build(messages, media, frame_plan)

    def embed_item(self, prompt: Prompt, index: int) -> torch.Tensor:
        """A video's pooled grids, or an image with its tiles."""
        num_videos = len(prompt.visual_grids)
        if index < num_videos:
            return self._embed_frames(split_frames(prompt.extras, prompt.visual_grids)[index])
        image = slice(index - num_videos, index - num_videos + 1)
        (features,) = self.model.model.get_image_features(
            self._on_device(prompt.extras["pixel_values"][image]),
            prompt.extras["image_sizes"][image],
            # The whole prompt's number: several images are not cut into tiles.
            batch_num_images=prompt.extras["batch_num_images"],
            return_dict=True,
        ).pooler_output
        assert isinstance(features, torch.Tensor)
        return features

    def _embed_frames(self, frames: torch.Tensor) -> torch.Tensor:
        features = []
        for part in torch.split(frames, VISION_FRAMES):
            embedded = self.model.model.get_video_features(
                self._on_device(part)[None], return_dict=True
            )
            features.append(embedded.pooler_output[0, :-1])  # a newline ends it
        return torch.cat(features)

    def embed_others(self, prompt: Prompt) -> Sequence[torch.Tensor]:
        """A newline a video."""
        return (self.model.model.image_newline.expand(len(prompt.visual_grids), -1),)

    def visual_places(self, prompt: Prompt) -> torch.Tensor:
        """The prunable tokens, then the images' tokens, then the videos' newlines."""
        others = [
            prompt.extras[name]
            for name in ("image_indices", "newline_indices")
            if name in prompt.extras
        ]
        return torch.cat((prompt.visual_indices, *others))

    def _on_device(self, pixels: torch.Tensor) -> torch.Tensor:
        return to_device(pixels, self.embedding.device).to(self.embedding.dtype)


def load(
    checkpoint: Checkpoint, plan: LoadPlan, progress: Progress, shards: Shards | None
) -> LlavaOnevision:
    """Loads a LLaVA-OneVision checkpoint; hippo.models.loading.load_model is the way in."""
    _check_configuration(checkpoint)
    pretrained = load_pretrained(
        checkpoint, "LlavaOnevisionForConditionalGeneration", plan, progress, shards
    )
    _check_processor(checkpoint, pretrained)
    replace_products(pretrained.model.model.vision_tower, pretrained.make_linear)
    replace_products(pretrained.model.model.multi_modal_projector, pretrained.make_linear)
    return LlavaOnevision(pretrained)


def _check_configuration(checkpoint: Checkpoint) -> None:
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


def _check_processor(checkpoint: Checkpoint, pretrained: Pretrained) -> None:
    """Raises ModelLoadError unless the processor makes what the vision tower takes."""
    vision, processor = pretrained.model.config.vision_config, pretrained.processor
    side = vision.image_size
    size = dict(processor.video_processor.size)
    if (size.get("height"), size.get("width")) != (side, side):
        raise ModelLoadError(
            f"{checkpoint.name}: its processor makes frames of size {size}, its vision tower "
            f"takes {side} x {side} pixels"
        )
    num_patches = (side // vision.patch_size) ** 2
    if processor.num_image_tokens != num_patches:
        raise ModelLoadError(
            f"{checkpoint.name}: its processor counts {processor.num_image_tokens} tokens a frame "
            f"(num_image_tokens), its vision tower gives {num_patches}"
        )
