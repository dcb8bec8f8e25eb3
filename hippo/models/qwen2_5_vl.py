"""Qwen2.5-VL: transformers' model and processor behind the project's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hippo.models.base import DecodedMedia, Prompt
from hippo.models.checkpoint import Checkpoint
from hippo.models.family import CachedModel
from hippo.models.pretrained import Pretrained, load_pretrained
from hippo.models.qwen_prompt import PromptBuilder
from hippo.models.vision import speed_up_vision
from hippo.types import ChatMessage, FramePlan


class Qwen2_5_VL(CachedModel):
    """A loaded Qwen2.5-VL checkpoint with its key-value cache; see VideoLanguageModel."""

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__(pretrained, num_axes=3)
        self._prompts = PromptBuilder(
            pretrained.processor,
            pretrained.model.model.get_rope_index,
            max_context_length=pretrained.info.max_context_length,
        )

    def prepare(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """See VideoLanguageModel.prepare."""
        return self._prompts.build(messages, media, frame_plan)

    @torch.inference_mode()
    def embed_visual(self, prompt: Prompt) -> torch.Tensor | None:
        """Vision tower: ``[num_visual_tokens, hidden]``, followed by the images' tokens, if any."""
        features = []
        for kind in ("video", "image"):
            pixels = prompt.extras.get("pixel_values_videos" if kind == "video" else "pixel_values")
            if pixels is not None:
                grids = prompt.extras[f"{kind}_grid_thw"]
                embed = getattr(self.model.model, f"get_{kind}_features")
                pixels = pixels.to(device=self.embedding.device, dtype=self.embedding.dtype)
                features += embed(pixels, grids, return_dict=True).pooler_output
        return torch.cat(features) if features else None

    def visual_places(self, prompt: Prompt) -> torch.Tensor:
        """The prunable tokens, followed by the images' tokens, if any."""
        image_indices = prompt.extras.get("image_indices")
        if image_indices is None:
            return prompt.visual_indices
        return torch.cat((prompt.visual_indices, image_indices))


def load(checkpoint: Checkpoint, **options: Any) -> Qwen2_5_VL:
    """Loads a Qwen2.5-VL checkpoint, with the options of load_pretrained.

    hippo.models.loading.load_model is the way in.
    """
    pretrained = load_pretrained(checkpoint, "Qwen2_5_VLForConditionalGeneration", **options)
    if pretrained.make_linear is not None:
        speed_up_vision(pretrained.model.model.visual, pretrained.make_linear)
    return Qwen2_5_VL(pretrained)
