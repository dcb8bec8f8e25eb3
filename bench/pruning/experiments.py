"""The choices of each experiment, and the rows of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.pruning.choices import Choice
from bench.pruning.statistics import difference, interval
from bench.pruning.teacher import ChoiceOutcome
from hippo.pruning.select import SelectionOptions
from hippo.types import PruningStrategy, SpatialScore

RATIOS = (0.5, 0.75, 0.9, 0.95, 0.98)
STRATEGIES = (
    PruningStrategy.HOLISTIC,
    PruningStrategy.HYBRID,
    PruningStrategy.ATTENTION,
    PruningStrategy.SPECVLM,
    PruningStrategy.UNIFORM,
    PruningStrategy.RANDOM,
)
LAYERS = (1, 2, 3, 5, 10, 15, 20)
BASE = "scores: attention + temporal + spatial"  # the ablation's reference


def ratio_choices(num_layers: int) -> dict[str, Choice]:
    """Returns every strategy at every ratio, ``none`` and ``blind``, by label."""
    choices = {
        "none": Choice(strategy=PruningStrategy.NONE, ratio=0.0, num_layers=num_layers),
        "blind": Choice(strategy=PruningStrategy.BLIND, ratio=1.0, num_layers=num_layers),
    }
    for strategy in STRATEGIES:
        for ratio in RATIOS:
            choices[f"{strategy.value} {ratio:g}"] = Choice(
                strategy=strategy, ratio=ratio, num_layers=num_layers
            )
    return choices


def confirmation_choices(num_layers: int) -> dict[str, Choice]:
    """Returns ``none``, and the strategies at the ratios 0.9 and 0.95."""
    return {
        label: choice
        for label, choice in ratio_choices(num_layers).items()
        if choice.strategy is PruningStrategy.NONE
        or (choice.strategy in STRATEGIES and choice.ratio in (0.9, 0.95))
    }


def frames_choices(num_layers: int) -> dict[str, Choice]:
    """Returns ``none``, and holistic at ratio 0.9."""
    every = ratio_choices(num_layers)
    return {label: every[label] for label in ("none", "holistic 0.9")}


def ablation_choices(num_layers: int, ratio: float, most_layers: int) -> dict[str, Choice]:
    """Returns variants of holistic with one change each; the label begins with the option."""
    base = Choice(strategy=PruningStrategy.HOLISTIC, ratio=ratio, num_layers=num_layers)
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
        "normalisation: min-max": varied(normalisation="min-max"),
        "normalisation: z-score": varied(normalisation="z-score"),
        "keys: visual": replace(base, scope="visual"),
        "keys: all": replace(base, scope="all"),
        "top-k: global": varied(per_frame=False),
        "top-k: per frame": varied(per_frame=True),
        "top-k: by the frame's change (hybrid)": replace(base, strategy=PruningStrategy.HYBRID),
        **{f"spread: {spread:g}": varied(spread=spread) for spread in (0.0, 0.05, 0.1, 0.2)},
        **{f"crop: {crop}": varied(crop=crop) for crop in (3, 5, 7)},
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
    choices["none"] = replace(base, strategy=PruningStrategy.NONE, ratio=0.0)
    return choices


def agreement_rows(
    outcomes: Mapping[str, ChoiceOutcome], *, references: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Returns a row per choice: agreement on all tokens, on content words if they are known, and
    differences.

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
        for reference in references:
            if reference in outcomes:
                row[f"minus {reference}"] = difference(
                    outcome.tokens, outcomes[reference].tokens
                ).as_dict()
        rows.append(row)
    return rows
