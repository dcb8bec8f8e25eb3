"""The Qwen-VL families: their vision tower and their descriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hippo.models.base import VisualItem
from hippo.models.family import Family, VisionTower
from hippo.models.pretrained import Pretrained
from hippo.models.qwen_prompt import QwenPromptBuilder, TimedPromptBuilder
from hippo.models.vision import place_beside_first, speed_up_vision
from hippo.models.windows import WINDOWS_NAME, register_windows
from hippo.sizes import VISION_PATCHES


class QwenTower(VisionTower):
    """See VisionTower; an item is the merged patches of a video or an image.

    Qwen3-VL's features for the first layers (deepstack) follow a token's embedding.
    """

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__(pretrained)
        visual = self.model.visual
        speed_up_vision(visual, pretrained.make_linear)
        register_windows()
        visual.config._attn_implementation = WINDOWS_NAME  # the tower's own config
        # The grid is on the host, because the tower reads it there in each layer.
        visual.rotary_pos_emb.register_forward_pre_hook(place_beside_first)

    def embed_item(self, item: VisualItem) -> Iterator[torch.Tensor]:
        """See VisionTower.embed_item; no operation of the towers crosses frames, full attention
        included, so a video is cut between frames."""
        assert item.pixels is not None
        _, rows, columns = item.grid  # of patches; a frame is two sampled ones
        per_frame = rows * columns
        most = per_frame * max(1, VISION_PATCHES // per_frame)
        for part in torch.split(item.pixels, most):
            grid = torch.tensor([[part.shape[0] // per_frame, rows, columns]])
            yield self._embed_part(self.on_device(part, item.kind), grid)

    def _embed_part(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        output = self.model.visual(patches, grid_thw=grid)
        embedded: torch.Tensor = output.pooler_output
        deepstack = getattr(output, "deepstack_features", None)
        return torch.cat((embedded, *deepstack), 1) if deepstack else embedded


def _prompts(kind: type[QwenPromptBuilder]) -> Callable[[Pretrained], QwenPromptBuilder]:
    return lambda pretrained: kind(
        pretrained.processor,
        pretrained.model.model.get_rope_index,
        max_context_length=pretrained.info.max_context_length,
    )


_PATCHES = "2 x 2 merged patches of two frames"
_BY_SIZE = "the frame size sets the number"

QWEN2_VL = Family(
    title="Qwen2-VL",
    architecture="Qwen2VLForConditionalGeneration",
    num_axes=3,
    make_prompts=_prompts(QwenPromptBuilder),
    make_tower=QwenTower,
    video_tokens=f"{_PATCHES}; {_BY_SIZE}",
)
QWEN2_5_VL = Family(
    title="Qwen2.5-VL",
    architecture="Qwen2_5_VLForConditionalGeneration",
    num_axes=3,
    make_prompts=_prompts(QwenPromptBuilder),
    make_tower=QwenTower,
    video_tokens=f"{_PATCHES}; {_BY_SIZE}",
)
QWEN3_VL = Family(
    title="Qwen3-VL",
    architecture="Qwen3VLForConditionalGeneration",
    num_axes=3,
    make_prompts=_prompts(TimedPromptBuilder),
    make_tower=QwenTower,
    video_tokens=f"{_PATCHES}, behind their time as text; {_BY_SIZE}",
)
