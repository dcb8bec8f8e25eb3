"""The Qwen-VL families: their vision tower and their descriptions."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hippo.models.families.family import Family, VisionTower
from hippo.models.families.hybrid import check_hybrid
from hippo.models.families.qwen_prompt import QwenPromptBuilder, TimedPromptBuilder
from hippo.models.families.vision import place_beside_first, speed_up_vision, widen_range
from hippo.models.families.windows import WINDOWS_NAME, register_windows
from hippo.models.interface.base import VisualItem
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.interface.transfer import to_device
from hippo.models.loading.pretrained import Pretrained


class QwenTower(VisionTower):
    """See VisionTower; an item is the merged patches of a video or an image.

    Qwen3-VL's features for the first layers (deepstack) follow a token's embedding.
    """

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__(pretrained)
        visual = self.model.visual
        widen_range(visual, self._embedding.device)
        speed_up_vision(visual, pretrained.make_linear)
        register_windows()
        visual.config._attn_implementation = WINDOWS_NAME  # the tower's own config
        # The grid is on the host, because the tower reads it there in each layer.
        visual.rotary_pos_emb.register_forward_pre_hook(place_beside_first)

    def embed_item(self, item: VisualItem) -> Iterator[torch.Tensor]:
        """See VisionTower.embed_item; no operation of the towers crosses frames, full attention
        included, so a video is cut between frames."""
        assert item.pixels is not None
        _, rows, columns = item.grid  # in patches; a frame is two sampled frames
        per_frame = rows * columns
        for part in torch.split(item.pixels, per_frame * self.pictures_at_once(per_frame)):
            grid = torch.tensor([[part.shape[0] // per_frame, rows, columns]])
            yield self._embed_part(self.on_device(part, item.kind), grid)

    def _embed_part(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        visual = self.model.visual
        given = {}
        if hasattr(visual, "pos_embed"):  # Qwen3-VL
            given = _learned_positions(visual, grid, patches.device)
        elif hasattr(visual, "window_size"):  # Qwen2.5-VL
            given = _windows(visual, grid, patches.device)
        output = visual(patches, grid_thw=grid, **given)
        embedded: torch.Tensor = output.pooler_output
        deepstack = getattr(output, "deepstack_features", None)
        return torch.cat((embedded, *deepstack), 1) if deepstack else embedded


def _learned_positions(
    visual: Any, grid: torch.Tensor, device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns the places and weights by which a tower resamples its learned positions to a grid;
    the tower itself would leave them on the host, where the grid is."""
    vision_utils: Any = importlib.import_module("transformers.vision_utils")
    found = vision_utils.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=visual.spatial_merge_size,
    )
    indices, weights = (to_device(each, device) for each in found)
    return {"interp_indices": indices, "interp_weights": weights}


def _windows(visual: Any, grid: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the order of the merged patches by windows, and the windows' boundaries, which
    hippo.models.families.windows reads on the host. With the order on the host, as the tower itself
    would have it, each use would wait for the device."""
    vision_utils: Any = importlib.import_module("transformers.vision_utils")
    order, boundaries = vision_utils.get_vision_window_index(
        grid,
        spatial_merge_size=visual.spatial_merge_size,
        window_size=visual.window_size,
        patch_size=visual.patch_size,
    )
    return {"window_index": to_device(order, device), "cu_window_seqlens": boundaries}


def _family(
    title: str,
    classes: str,
    prompts: type[QwenPromptBuilder],
    video_tokens: str,
    check_configuration: Callable[[Checkpoint, LoadPlan], None] | None = None,
) -> Family:
    """``classes`` is the beginning of the names of the family's classes in transformers."""
    return Family(
        title=title,
        architecture=f"{classes}ForConditionalGeneration",
        num_axes=3,
        make_prompts=lambda pretrained: prompts(
            pretrained.processor,
            pretrained.model.model.get_rope_index,
            max_context_length=pretrained.info.max_context_length,
        ),
        make_tower=QwenTower,
        video_tokens=video_tokens,
        check_configuration=check_configuration,
    )


_PATCHES = "2 x 2 merged patches of two frames"
_BY_SIZE = "the frame size sets the number"
_TIMED = f"{_PATCHES}, behind their time as text; {_BY_SIZE}"

QWEN2_VL = _family("Qwen2-VL", "Qwen2VL", QwenPromptBuilder, f"{_PATCHES}; {_BY_SIZE}")
QWEN2_5_VL = _family("Qwen2.5-VL", "Qwen2_5_VL", QwenPromptBuilder, f"{_PATCHES}; {_BY_SIZE}")
QWEN3_VL = _family("Qwen3-VL", "Qwen3VL", TimedPromptBuilder, _TIMED)
QWEN3_VL_MOE = _family("Qwen3-VL with experts", "Qwen3VLMoe", TimedPromptBuilder, "as `qwen3_vl`")
QWEN3_5 = _family("Qwen3.5", "Qwen3_5", TimedPromptBuilder, "as `qwen3_vl`", check_hybrid)
QWEN3_5_MOE = _family(
    "Qwen3.5 with experts", "Qwen3_5Moe", TimedPromptBuilder, "as `qwen3_vl`", check_hybrid
)
