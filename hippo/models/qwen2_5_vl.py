"""The Qwen2.5-VL family: its vision tower and its description."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hippo.models.base import Prompt
from hippo.models.family import Family, VisionTower
from hippo.models.pretrained import Pretrained
from hippo.models.qwen_prompt import IMAGE_EXTRAS, VIDEO_EXTRAS, QwenPromptBuilder, split_patches
from hippo.models.vision import place_beside_first, speed_up_vision
from hippo.models.windows import WINDOWS_NAME, register_windows
from hippo.sizes import VISION_PATCHES
from hippo.types import MediaKind


class QwenTower(VisionTower):
    """See VisionTower; an item is the merged patches of a video or an image."""

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__(pretrained)
        visual = self.model.visual
        speed_up_vision(visual, pretrained.make_linear)
        register_windows()
        visual.config._attn_implementation = WINDOWS_NAME  # the tower's own config
        # The grid is on the host, because the tower reads it there in each layer.
        visual.rotary_pos_emb.register_forward_pre_hook(place_beside_first)

    def embed_item(self, prompt: Prompt, index: int) -> Iterator[torch.Tensor]:
        """See VisionTower.embed_item; no operation of the tower crosses frames, full attention
        included, so a video is cut between frames."""
        num_videos = len(prompt.visual_grids)
        kind, names = MediaKind.VIDEO, VIDEO_EXTRAS
        if index >= num_videos:
            kind, names = MediaKind.IMAGE, IMAGE_EXTRAS
            index -= num_videos
        pixels, grids = (prompt.extras[name] for name in names)
        patches = split_patches(pixels, grids)[index]
        grid = grids[index]  # frames (of two each), rows and columns of patches
        per_frame = int(grid[1] * grid[2])
        for part in torch.split(patches, per_frame * max(1, VISION_PATCHES // per_frame)):
            part_grid = torch.stack((grid.new_tensor(part.shape[0] // per_frame), *grid[1:]))[None]
            yield self._embed_part(self.on_device(part, kind), part_grid)

    def _embed_part(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.model.visual(patches, grid_thw=grid).pooler_output
        return features


QWEN2_5_VL = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    num_axes=3,
    make_prompts=lambda pretrained: QwenPromptBuilder(
        pretrained.processor,
        pretrained.model.model.get_rope_index,
        max_context_length=pretrained.info.max_context_length,
    ),
    make_tower=QwenTower,
)
