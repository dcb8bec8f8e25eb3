"""Choices of the visual tokens for the draft: strategy, ratio and ablated options."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bench.drafts.traces import ClipTrace, SampleTrace
from hippo.pruning.scores import Scope
from hippo.pruning.select import (
    SelectionOptions,
    VisualScores,
    needs_alignment,
    needs_attention,
    needs_features,
    select_tokens,
)
from hippo.types import Pruning, PruningStrategy


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to choose tokens; the first ``num_layers`` layers of the target are tapped."""

    strategy: PruningStrategy
    ratio: float
    num_layers: int
    scope: Scope = "visual"
    options: SelectionOptions = field(default_factory=SelectionOptions)
    is_compacted: bool = False  # kept tokens get consecutive positions
    is_falling: bool = False  # uv: the tokens whose alignment falls most, instead of grows

    def kept(self, clip: ClipTrace, trace: SampleTrace, seed: int) -> torch.Tensor:
        """Returns the ascending int64 indices of kept tokens, on the CPU; ``seed`` is for
        ``random``. Scores are computed in float32 on the features' device."""
        attention = features = alignment = None
        if needs_attention(self.strategy):
            attention = trace.attention[self.scope][: self.num_layers].mean(0)
            attention = attention.to(clip.target_features.device)
        if needs_features(self.strategy):
            features = clip.target_features
        if needs_alignment(self.strategy):
            alignment = trace.alignment[self.num_layers].to(clip.target_features.device)
            alignment = -alignment if self.is_falling else alignment
        return select_tokens(
            Pruning(self.strategy, self.ratio, seed),
            clip.grids,
            clip.target_features.shape[0],
            VisualScores(attention, features, alignment),
            self.options,
        ).cpu()
