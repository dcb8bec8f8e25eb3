"""The choice of visual tokens for the draft, before the target's prefill or during it."""

from dataclasses import replace
from time import perf_counter_ns

import torch

from hippo.models.interface.base import AttentionTap, Prompt
from hippo.models.interface.context import most_kept
from hippo.pruning.select import (
    DEFAULT_OPTIONS,
    SelectionOptions,
    VisualScores,
    needs_alignment,
    needs_features,
    needs_prefill,
    num_kept,
    select_tokens,
)
from hippo.types import Pruning, PruningStrategy, Selection


def bounded_pruning(pruning: Pruning, prompt: Prompt, max_tokens: int) -> Pruning:
    """Returns the pruning of a prompt: the request's, or one that keeps as many visual tokens as a
    slot of the draft has room for beside the other tokens and an answer of ``max_tokens``.

    The strategy stays, but ``none`` becomes ``uniform``, and ``blind`` stands in if no visual token
    has room.
    """
    num_visual = int(prompt.visual_indices.shape[0])
    if not pruning.draft_cache_tokens or pruning.strategy is PruningStrategy.BLIND:
        return pruning
    most = most_kept(pruning.draft_cache_tokens, prompt.length - num_visual, max_tokens)
    is_pruned = (
        pruning.strategy is not PruningStrategy.NONE and num_visual >= pruning.min_visual_tokens
    )
    if (num_kept(num_visual, pruning.ratio) if is_pruned else num_visual) <= most:
        return pruning
    if not most:
        return replace(pruning, strategy=PruningStrategy.BLIND, min_visual_tokens=0)
    is_none = pruning.strategy is PruningStrategy.NONE
    return replace(
        pruning,
        strategy=PruningStrategy.UNIFORM if is_none else pruning.strategy,
        ratio=(num_visual - most) / num_visual,
        min_visual_tokens=0,
    )


def needs_scores(pruning: Pruning, num_visual_tokens: int) -> bool:
    """Whether the choice needs scores; False if all tokens are kept."""
    if num_visual_tokens < pruning.min_visual_tokens or not needs_prefill(pruning.strategy):
        return False
    return num_kept(num_visual_tokens, pruning.ratio) < num_visual_tokens


def select_without_scores(pruning: Pruning, prompt: Prompt) -> Selection:
    """Returns the selection if ``needs_scores`` is False; any thread, without a device."""
    began_ns = perf_counter_ns()
    num_visual = int(prompt.visual_indices.shape[0])
    has_few = num_visual < pruning.min_visual_tokens
    if has_few or needs_prefill(pruning.strategy):
        pruning = Pruning(PruningStrategy.NONE)
    kept = select_tokens(pruning, prompt.visual_grids, num_visual)
    return Selection(tuple(kept.tolist()), num_visual, score_ns=perf_counter_ns() - began_ns)


def tap_for(pruning: Pruning, num_layers: int) -> AttentionTap:
    """Returns the tap of the first ``num_layers`` layers that a choice by scores needs."""
    if needs_alignment(pruning.strategy):
        return AttentionTap(num_layers, is_alignment=True)
    return AttentionTap(num_layers, "causal" if pruning.causal_attention else "visual")


class ScoredSelection:
    """A choice by scores during the prefill, on the device thread.

    The prefill must be given ``tap`` (of ``tap_for``). ``embeddings`` ``[num_visual_tokens,
    hidden]`` belong to the prunable tokens, or are None if the strategy does not need them.
    """

    def __init__(
        self,
        pruning: Pruning,
        prompt: Prompt,
        embeddings: torch.Tensor | None,
        tap: AttentionTap,
        options: SelectionOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._pruning = pruning
        self._options = options
        self._grids = prompt.visual_grids
        self._num_visual = int(prompt.visual_indices.shape[0])
        self._features = embeddings if needs_features(pruning.strategy) else None
        self.tap = tap
        self._kept: torch.Tensor | None = None  # on the CPU, once ``_copied`` has passed
        self._copied: torch.cuda.Event | None = None
        self._host_ns = 0
        self._is_taken = False

    def take_selection(self, *, is_last: bool = False) -> Selection | None:
        """Returns the selection once, after the piece of the prefill that completes the scores.

        On a GPU the selection is returned one piece later, unless this piece ``is_last``, so that
        the device has work while the host waits for the indices.
        """
        if self._is_taken or self.tap.layer_scores is None:
            return None
        if self._kept is None:
            self._choose()
            if self._copied is not None and not is_last:
                return None
        if self._copied is not None:
            self._copied.synchronize()
        assert self._kept is not None
        self._is_taken = True
        score_ns = self._host_ns + self.tap.score_ns
        return Selection(tuple(self._kept.tolist()), self._num_visual, score_ns=score_ns)

    @torch.inference_mode()
    def _choose(self) -> None:
        began_ns = perf_counter_ns()
        measured = "alignment" if self.tap.is_alignment else "attention"
        scores = VisualScores(features=self._features, **{measured: self.tap.scores})
        self._features = None
        kept = select_tokens(self._pruning, self._grids, self._num_visual, scores, self._options)
        if kept.is_cuda:
            self._kept = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
            self._kept.copy_(kept, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(kept.device))
        else:
            self._kept = kept
        self._host_ns = perf_counter_ns() - began_ns
