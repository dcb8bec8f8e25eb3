"""What services do with a model, as functions of it, to compare the same model on two devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hippo.engine.warmup import warm_up
from hippo.models.interface.base import (
    AttentionTap,
    Prompt,
    SequenceRows,
    StepPlan,
    prunable_embeddings,
)
from hippo.models.interface.base import VideoLanguageModel as Model
from hippo.pruning.select import needs_prefill
from hippo.types import Pruning, PruningStrategy
from services.target.selection import ScoredSelection, tap_for
from tests.support.models.reference import clip, prepare, user

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-vl": ("target_checkpoint", {}),
    "qwen2.5-vl, steps of fixed shape": ("target_checkpoint", {"exact_rows": 8}),
    "llava-onevision": ("llava_checkpoint", {}),
    "qwen3-vl with experts": ("experts_checkpoint", {}),
    "internvl": ("internvl_checkpoint", {}),
}


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


def compare_all(
    here: Model,
    there: Model,
    agree: Callable[[Callable[[Model], torch.Tensor]], torch.Tensor],
    *,
    selects_alike: bool = True,
) -> tuple[Prompt, torch.Tensor]:
    """Compares all calls on both models, which have four slots of 512 tokens; ``agree`` runs a call
    on both and returns the result of ``here``. Returns the prompt, and the logits of a step."""
    prompt = prepare(here, user(0, "what is it?"), clip())
    visual = {model: model.embed_visual(prompt) for model in (here, there)}

    def prefill(
        model: Model, slot: int, kept: Any = None, tap: Any = None, num_reused: int = 0
    ) -> torch.Tensor:
        *_, logits = model.prefill(slot, prompt, visual[model], kept, tap, num_reused)
        assert logits is not None
        return logits if tap is None else tap.layer_scores

    def step(model: Model, rows: tuple[SequenceRows, ...], num_copied: int = 0) -> torch.Tensor:
        if num_copied:
            model.copy_rows(0, 1, num_copied)
        return model.forward(StepPlan(rows)).clone()  # the next one may be written over it

    def score(model: Model) -> torch.Tensor:
        taps = AttentionTap(2), AttentionTap(2, "causal"), AttentionTap(2, is_alignment=True)
        return torch.cat([prefill(model, 2, tap=tap) for tap in taps])

    def prefills(slot: int, **options: Any) -> None:
        agree(partial(prefill, slot=slot, **options))

    def steps(*rows: SequenceRows, num_copied: int = 0) -> torch.Tensor:
        return agree(partial(step, rows=rows, num_copied=num_copied))

    for slot in range(4):
        prefills(slot)
    for num_rows in (1, 2, 8, 9, 33, 70):
        steps(SequenceRows(0, 0, tuple(range(5, 5 + num_rows))))
    for start in (0, 70, 140, 210):
        steps(SequenceRows(0, start, tuple(range(5, 75))))
    steps(SequenceRows(0, 280, (5, 6, 7)))  # after a long prefix
    several = [SequenceRows(slot, 0, (5,) * rows) for slot, rows in ((3, 3), (1, 1), (2, 9))]
    logits = steps(*several)
    steps(*several, num_copied=5)
    warm_up(there, prompt, slot=1, num_tapped=1, max_rows=9)

    prefills(0, kept=torch.arange(0, int(prompt.visual_indices.shape[0]), 3))
    prefills(1)
    agree(score)
    prefills(1, num_reused=4)
    for strategy in filter(needs_prefill, PruningStrategy):
        chosen = [select(model, strategy, prompt, visual[model]) for model in (here, there)]
        assert len(chosen[0]) == len(chosen[1]) > 0
        assert not selects_alike or chosen[0] == chosen[1]
    return prompt, logits
