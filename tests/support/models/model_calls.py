"""What services do with a model, as functions of it, to compare the same model on two devices."""

from __future__ import annotations

from typing import Any

import torch

from hippo.models.interface.base import AttentionTap, Prompt, StepPlan, prunable_embeddings
from hippo.models.interface.base import VideoLanguageModel as Model
from hippo.types import Pruning, PruningStrategy
from services.target.selection import ScoredSelection, tap_for

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-vl": ("target_checkpoint", {}),
    "qwen2.5-vl, steps of fixed shape": ("target_checkpoint", {"exact_rows": 8}),
    "llava-onevision": ("llava_checkpoint", {}),
    "qwen3-vl with experts": ("experts_checkpoint", {}),
    "internvl": ("internvl_checkpoint", {}),
}

Visual = dict[Model, torch.Tensor | None]


def prefill(
    model: Model,
    *,
    slot: int,
    prompt: Prompt,
    visual: Visual,
    kept: torch.Tensor | None = None,
    tap: AttentionTap | None = None,
    num_reused: int = 0,
) -> torch.Tensor:
    *_, logits = model.prefill(slot, prompt, visual[model], kept, tap, num_reused)
    assert logits is not None
    return logits


def score(model: Model, *, slot: int, prompt: Prompt, visual: Visual) -> torch.Tensor:
    taps = AttentionTap(2), AttentionTap(2, "causal"), AttentionTap(2, is_alignment=True)
    found = []
    for tap in taps:
        prefill(model, slot=slot, prompt=prompt, visual=visual, tap=tap)
        assert tap.layer_scores is not None
        found.append(tap.layer_scores)
    return torch.cat(found)


def step(model: Model, *, plan: StepPlan) -> torch.Tensor:
    return model.forward(plan).clone()  # the next one may be written over it


def step_behind_copy(model: Model, *, plan: StepPlan) -> torch.Tensor:
    model.copy_rows(0, 1, 5)
    return step(model, plan=plan)


def select(
    model: Model, strategy: PruningStrategy, prompt: Prompt, visual: torch.Tensor | None
) -> tuple[int, ...]:
    pruning = Pruning(strategy, ratio=0.5, min_visual_tokens=1)
    assert visual is not None
    embeddings = prunable_embeddings(model, prompt, visual)
    selection = ScoredSelection(pruning, prompt, embeddings, tap=tap_for(pruning, 2))
    pieces = model.prefill(3, prompt, visual, None, selection.tap)
    taken = [selection.take_selection() for _ in pieces]
    taken.append(selection.take_selection(is_last=True))
    (found,) = filter(None, taken)
    return found.kept_indices
