"""The choices of visual tokens that experiments compare: strategy, ratio and changed options."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.pruning.traces import ClipTrace, SampleTrace
from hippo.pruning.scores import Scope
from hippo.pruning.select import (
    SelectionOptions,
    VisualScores,
    needs_alignment,
    needs_attention,
    needs_features,
    select_tokens,
)
from hippo.types import Pruning, PruningStrategy, SpatialScore

RATIOS = (0.5, 0.75, 0.9, 0.95, 0.98)
STRATEGIES = (
    PruningStrategy.HOLISTIC,
    PruningStrategy.ATTENTION,
    PruningStrategy.SPECVLM,
    PruningStrategy.UV,
    PruningStrategy.UNIFORM,
    PruningStrategy.RANDOM,
)
LAYERS = (1, 2, 3, 5, 10, 15, 20)
ALIGNED = (2, 5)  # beside the default number of layers
BASE = "scores: attention + temporal + spatial"  # the ablation's reference


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
        if needs_features(self.strategy):
            features = clip.target_features
        if needs_alignment(self.strategy):
            alignment = trace.alignment[self.num_layers]
            alignment = -alignment if self.is_falling else alignment
        return select_tokens(
            Pruning(self.strategy, self.ratio, seed),
            clip.grids,
            clip.target_features.shape[0],
            VisualScores(attention, features, alignment),
            self.options,
        ).cpu()


@dataclass(frozen=True, slots=True)
class Layers:
    """How many layers are tapped: by default, and at most; the model's last layer has no alignment
    (AttentionTap)."""

    default: int
    most: int

    @property
    def aligned(self) -> list[int]:
        """The numbers of layers over which alignment is measured, ascending."""
        counts = {*ALIGNED, self.default} if self.most > 1 else set()
        return sorted({min(count, self.most - 1) for count in counts})

    def of(self, strategy: PruningStrategy) -> int:
        """The number of layers that score by default."""
        return min(self.default, self.most - 1) if needs_alignment(strategy) else self.default


def ratio_choices(layers: Layers) -> dict[str, Choice]:
    """Returns every strategy at every ratio, ``none`` and ``blind``, by label."""
    choices = {
        "none": Choice(PruningStrategy.NONE, 0.0, layers.default),
        "blind": Choice(PruningStrategy.BLIND, 1.0, layers.default),
    }
    for strategy in STRATEGIES:
        if needs_alignment(strategy) and not layers.aligned:
            continue
        for ratio in RATIOS:
            choices[f"{strategy.value} {ratio:g}"] = Choice(strategy, ratio, layers.of(strategy))
    return choices


def confirmation_choices(layers: Layers) -> dict[str, Choice]:
    """Returns ``none``, and the strategies at the ratios 0.9 and 0.95."""
    return {
        label: choice
        for label, choice in ratio_choices(layers).items()
        if label == "none" or choice.ratio in (0.9, 0.95)
    }


def frames_choices(layers: Layers) -> dict[str, Choice]:
    """Returns ``none``, and holistic at ratio 0.9."""
    every = ratio_choices(layers)
    return {label: every[label] for label in ("none", "holistic 0.9")}


def ablation_choices(layers: Layers, ratio: float) -> dict[str, Choice]:
    """Returns variants of holistic with one change each, whose label begins with the option; then
    the other strategies, and the published choices."""
    base = Choice(PruningStrategy.HOLISTIC, ratio, layers.default)

    def varied(**changes: Any) -> Choice:
        return replace(base, options=replace(base.options, **changes))

    attention_alone = varied(weights=(1.0, 0.0, 0.0))
    choices = {
        BASE: varied(weights=(1.0, 1.0, 1.0)),
        "scores: attention": attention_alone,
        "scores: temporal": varied(weights=(0.0, 1.0, 0.0)),
        "scores: spatial": varied(weights=(0.0, 0.0, 1.0)),
        "scores: attention + temporal": varied(weights=(1.0, 1.0, 0.0)),
        "scores: attention + spatial": varied(weights=(1.0, 0.0, 1.0)),
        "scores: temporal + spatial": varied(weights=(0.0, 1.0, 1.0)),
        "scores: raw attention, not normalised": replace(base, strategy=PruningStrategy.ATTENTION),
        **{
            f"spatial: {name}": varied(spatial=score, weights=weights)
            for score in SpatialScore
            for name, weights in (
                (f"{score}", (1.0, 1.0, 1.0)),
                (f"{score} alone", (0.0, 0.0, 1.0)),
                (f"{score} + attention", (1.0, 0.0, 1.0)),
                (f"{score} + temporal", (0.0, 1.0, 1.0)),
            )
        },
        "attention: of all text behind the video, causal": replace(base, scope="causal"),
        **{f"spread: {spread:g}": varied(spread=spread) for spread in (0.0, 0.05, 0.1, 0.2)},
        "positions: original": base,
        "positions: compacted": replace(base, is_compacted=True),
    }
    counts = [count for count in LAYERS if count <= layers.most]
    choices |= {f"layers: {count}": replace(base, num_layers=count) for count in counts}
    choices |= {
        f"layers, attention alone: {count}": replace(attention_alone, num_layers=count)
        for count in counts
    }
    for mass in (0.05, 0.1, 0.2, 0.4, 0.8):
        choices[f"specvlm's mass: {mass:g}"] = replace(
            base, strategy=PruningStrategy.SPECVLM, options=SelectionOptions(specvlm_mass=mass)
        )
    for count in layers.aligned:
        uv = replace(base, strategy=PruningStrategy.UV, num_layers=count)
        choices[f"uv, layers: {count}"] = uv
        choices[f"uv reversed, layers: {count}"] = replace(uv, is_falling=True)
    choices |= published_choices(layers.most, ratio)
    choices["none"] = replace(base, strategy=PruningStrategy.NONE, ratio=0.0)
    return choices


def published_choices(most_layers: int, ratio: float) -> dict[str, Choice]:
    """Returns the choices of the presets ``hippo`` and ``specvlm``, and of SpecVLM without one of
    its options each."""
    hippo = SelectionOptions(spatial=SpatialScore.VARIANCE, spread=0.0)
    specvlm = Choice(PruningStrategy.SPECVLM, ratio, most_layers, scope="causal", is_compacted=True)
    return {
        "preset hippo": Choice(PruningStrategy.HOLISTIC, ratio, most_layers, options=hippo),
        "preset specvlm": specvlm,
        "preset specvlm, original positions": replace(specvlm, is_compacted=False),
        "preset specvlm, question's attention": replace(specvlm, scope="visual"),
    }
