"""Qwen2.5-VL: transformers' model and processor behind the project's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hippo.models.base import DecodedMedia, Prompt
from hippo.models.checkpoint import Checkpoint, Progress
from hippo.models.family import CachedModel
from hippo.models.plan import LoadPlan
from hippo.models.pretrained import Pretrained, load_pretrained
from hippo.models.qwen_prompt import IMAGE_EXTRAS, VIDEO_EXTRAS, QwenPromptBuilder, split_patches
from hippo.models.vision import place_beside_first, speed_up_vision
from hippo.models.windows import WINDOWS_NAME, register_windows
from hippo.sizes import VISION_PATCHES
from hippo.transfer import to_device
from hippo.types import ChatMessage, FramePlan

if TYPE_CHECKING:
    from hippo.parallel.shards import Shards


class Qwen2_5_VL(CachedModel):
    """A loaded Qwen2.5-VL checkpoint with its key-value cache; see VideoLanguageModel."""

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__(pretrained, num_axes=3)
        self._prompts = QwenPromptBuilder(
            pretrained.processor,
            pretrained.model.model.get_rope_index,
            max_context_length=pretrained.info.max_context_length,
        )

    def prepare(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """See VideoLanguageModel.prepare."""
        return self._prompts.build(messages, media, frame_plan)

    def embed_item(self, prompt: Prompt, index: int) -> torch.Tensor:
        """The merged patches of a video or an image."""
        num_videos = len(prompt.visual_grids)
        if index < num_videos:
            pixels, grids = (prompt.extras[name] for name in VIDEO_EXTRAS)
            embed = self.model.model.get_video_features
        else:
            pixels, grids = (prompt.extras[name] for name in IMAGE_EXTRAS)
            embed = self.model.model.get_image_features
            index -= num_videos
        patches = split_patches(pixels, grids)[index]
        grid = grids[index]  # frames (of two each), rows and columns of patches
        per_frame = int(grid[1] * grid[2])
        features = []
        # Nothing in the tower crosses frames, its full attention neither.
        for part in torch.split(patches, per_frame * max(1, VISION_PATCHES // per_frame)):
            part_grid = torch.stack((grid.new_tensor(part.shape[0] // per_frame), *grid[1:]))[None]
            part = to_device(part, self.embedding.device).to(self.embedding.dtype)
            features += embed(part, part_grid, return_dict=True).pooler_output
        return torch.cat(features)

    def visual_places(self, prompt: Prompt) -> torch.Tensor:
        """The prunable tokens, followed by the images' tokens, if any."""
        image_indices = prompt.extras.get("image_indices")
        if image_indices is None:
            return prompt.visual_indices
        return torch.cat((prompt.visual_indices, image_indices))


def load(
    checkpoint: Checkpoint, plan: LoadPlan, progress: Progress, shards: Shards | None
) -> Qwen2_5_VL:
    """Loads a Qwen2.5-VL checkpoint; hippo.models.loading.load_model is the way in."""
    pretrained = load_pretrained(
        checkpoint, "Qwen2_5_VLForConditionalGeneration", plan, progress, shards
    )
    visual = pretrained.model.model.visual
    speed_up_vision(visual, pretrained.make_linear)
    register_windows()
    visual.config._attn_implementation = WINDOWS_NAME  # the tower's own config
    # The tower works out positions where the grid is: on the host, which reads that in each layer.
    visual.rotary_pos_emb.register_forward_pre_hook(place_beside_first)
    return Qwen2_5_VL(pretrained)
