"""The choices of each experiment, and the rows of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.pruning.choices import Choice
from bench.pruning.speed import replay_agreement
from bench.pruning.statistics import difference, interval
from bench.pruning.teacher import ChoiceOutcome
from hippo.lab.simulation.machine import Machine
from hippo.pruning.select import SelectionOptions, needs_alignment
from hippo.types import PruningStrategy, SpatialScore

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
    num_layers = layers.default
    choices = {
        "none": Choice(strategy=PruningStrategy.NONE, ratio=0.0, num_layers=num_layers),
        "blind": Choice(strategy=PruningStrategy.BLIND, ratio=1.0, num_layers=num_layers),
    }
    for strategy in STRATEGIES:
        if needs_alignment(strategy) and not layers.aligned:
            continue
        for ratio in RATIOS:
            choices[f"{strategy.value} {ratio:g}"] = Choice(
                strategy=strategy, ratio=ratio, num_layers=layers.of(strategy)
            )
    return choices


def confirmation_choices(layers: Layers) -> dict[str, Choice]:
    """Returns ``none``, and the strategies at the ratios 0.9 and 0.95."""
    return {
        label: choice
        for label, choice in ratio_choices(layers).items()
        if choice.strategy is PruningStrategy.NONE
        or (choice.strategy in STRATEGIES and choice.ratio in (0.9, 0.95))
    }


def frames_choices(layers: Layers) -> dict[str, Choice]:
    """Returns ``none``, and holistic at ratio 0.9."""
    every = ratio_choices(layers)
    return {label: every[label] for label in ("none", "holistic 0.9")}


def ablation_choices(layers: Layers, ratio: float) -> dict[str, Choice]:
    """Returns variants of holistic with one change each, whose label begins with the option; then
    the other strategies, and the published choices."""
    most_layers = layers.most
    base = Choice(strategy=PruningStrategy.HOLISTIC, ratio=ratio, num_layers=layers.default)
    attention = replace(base, strategy=PruningStrategy.ATTENTION)
    options = base.options

    def varied(**changes: Any) -> Choice:
        return replace(base, options=replace(options, **changes))

    choices = {
        BASE: varied(weights=(1.0, 1.0, 1.0)),
        "scores: attention": varied(weights=(1.0, 0.0, 0.0)),
        "scores: temporal": varied(weights=(0.0, 1.0, 0.0)),
        "scores: spatial": varied(weights=(0.0, 0.0, 1.0)),
        "scores: attention + temporal": varied(weights=(1.0, 1.0, 0.0)),
        "scores: attention + spatial": varied(weights=(1.0, 0.0, 1.0)),
        "scores: temporal + spatial": varied(weights=(0.0, 1.0, 1.0)),
        "scores: raw attention, not normalised": attention,
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
    for count in LAYERS:
        if count <= most_layers:
            choices[f"layers: {count}"] = replace(base, num_layers=count)
    for count in LAYERS:
        if count <= most_layers:
            choices[f"layers, attention alone: {count}"] = replace(
                varied(weights=(1.0, 0.0, 0.0)), num_layers=count
            )
    for mass in (0.05, 0.1, 0.2, 0.4, 0.8):
        choices[f"specvlm's mass: {mass:g}"] = replace(
            base, strategy=PruningStrategy.SPECVLM, options=SelectionOptions(specvlm_mass=mass)
        )
    for count in layers.aligned:
        uv = replace(base, strategy=PruningStrategy.UV, num_layers=count)
        choices[f"uv, layers: {count}"] = uv
        choices[f"uv reversed, layers: {count}"] = replace(uv, is_falling=True)
    choices |= published_choices(most_layers, ratio)
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


def agreement_rows(
    outcomes: Mapping[str, ChoiceOutcome],
    *,
    references: Sequence[str] = (),
    machine: Machine | None = None,
) -> list[dict[str, Any]]:
    """Returns a row per choice: agreement on all tokens, on content words if they are known, and
    differences; with a ``machine`` also tokens a pass and the decode speedup of adaptive, replayed
    on it.

    For each label in ``references`` a row has ``minus LABEL``, the difference from its agreement.
    """
    rows = []
    for label, outcome in outcomes.items():
        row: dict[str, Any] = {
            "label": label,
            "strategy": outcome.choice.strategy.value,
            "ratio": outcome.choice.ratio,
            "num_samples": outcome.num_samples,
            "num_clips": outcome.tokens.num_clips,
            "num_frames": round(outcome.num_frames / outcome.num_samples, 1),
            "prompt_tokens": round(outcome.num_prompt_tokens / outcome.num_samples, 1),
            "kept_tokens": round(outcome.num_kept / outcome.num_samples, 1),
            "agreement": interval(outcome.tokens).as_dict(),
        }
        if outcome.content.num_clips:
            row["content_agreement"] = interval(outcome.content).as_dict()
        if machine is not None:
            replayed = replay_agreement(outcome.traces, machine)
            row["tokens_a_pass"] = interval(replayed.tokens_a_pass).as_dict()
            row["decode_speedup"] = interval(replayed.decode_speedup).as_dict()
        for reference in references:
            if reference in outcomes:
                row[f"minus {reference}"] = difference(
                    outcome.tokens, outcomes[reference].tokens
                ).as_dict()
        rows.append(row)
    return rows
