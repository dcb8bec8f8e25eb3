"""Options of speculative decoding from the request, its preset and the operator's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from gateway.answer.plan import SpeculationPlan
from gateway.api.schemas import SpeculationOptions
from gateway.common.config import GatewaySettings
from hippo.errors import InvalidRequestError
from hippo.speculation.policies import DEFAULT_GAMMA, Gamma
from hippo.types import Pruning, PruningStrategy, SpatialScore

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Preset:
    """The options of a published system; they override the operator's defaults.

    docs/algorithms.md says how hippo's form of each system differs from its publication.
    """

    policy_name: str
    gamma: Gamma
    pruning: Pruning
    guesses: bool


_HOLISTIC = Pruning(
    PruningStrategy.HOLISTIC,
    ratio=0.9,
    spatial_score=SpatialScore.VARIANCE,
    spread=0.0,
    score_layer_share=1.0,
)
_TWO_STAGES = Pruning(
    PruningStrategy.SPECVLM,
    ratio=0.9,
    score_layer_share=1.0,
    causal_attention=True,
    compacted_positions=True,
)
PRESETS = {
    "hippo": Preset("vpsd", "auto", _HOLISTIC, guesses=False),
    "specvlm": Preset("serial", DEFAULT_GAMMA, _TWO_STAGES, guesses=False),
}


def speculation_plan(
    options: SpeculationOptions | None, settings: GatewaySettings
) -> SpeculationPlan:
    """Returns the plan of a request: its options override its preset, which overrides the defaults.

    Raises InvalidRequestError for values that the operator does not allow.
    """
    options = options or SpeculationOptions()
    most = settings.max_draft_tokens
    for name in ("gamma", "max_draft_tokens"):
        value = getattr(options, name)
        if isinstance(value, int) and value > most:
            raise InvalidRequestError(
                f"speculative.{name} is {value}; this server allows {most}",
                param=f"speculative.{name}",
            )
    by_default = Pruning(PruningStrategy(settings.pruning_strategy), settings.pruning_ratio)
    default = Preset(settings.policy, settings.gamma, by_default, guesses=True)
    preset = PRESETS[options.preset] if options.preset else default
    policy_name = options.policy or preset.policy_name
    gamma = given_or(options.gamma, preset.gamma)
    return SpeculationPlan(
        policy_name=policy_name,
        gamma=gamma if gamma == "auto" else min(gamma, most),
        max_draft_tokens=given_or(options.max_draft_tokens, most),
        pruning=_pruning(options, preset, settings),
        guesses=given_or(options.guesses, preset.guesses),
        is_default=not (
            options.preset or options.policy or options.gamma or options.max_draft_tokens
        ),
    )


def _pruning(options: SpeculationOptions, preset: Preset, settings: GatewaySettings) -> Pruning:
    given, published = options.pruning, preset.pruning
    spatial = SpatialScore(given.spatial_score) if given.spatial_score else None
    return Pruning(
        strategy=_pruning_strategy(options, preset, settings),
        ratio=given_or(given.ratio, published.ratio),
        seed=given.seed,
        min_visual_tokens=_min_visual_tokens(options, settings),
        spatial_score=given_or(spatial, published.spatial_score),
        spread=given_or(given.spread, published.spread),
        score_layer_share=given_or(given.score_layer_share, published.score_layer_share),
        causal_attention=given_or(given.causal_attention, published.causal_attention),
        compacted_positions=given_or(given.compacted_positions, published.compacted_positions),
    )


def _min_visual_tokens(options: SpeculationOptions, settings: GatewaySettings) -> int:
    """Returns the request's threshold; by default the operator's, or 0 if the request says how to
    prune."""
    pruning = options.pruning
    says_how = options.preset or pruning.strategy or pruning.ratio is not None
    default = 0 if says_how else settings.pruning_min_visual_tokens
    return given_or(pruning.min_visual_tokens, default)


def _pruning_strategy(
    options: SpeculationOptions, preset: Preset, settings: GatewaySettings
) -> PruningStrategy:
    given = options.pruning.strategy
    strategy = PruningStrategy(given) if given else preset.pruning.strategy
    if strategy.value not in settings.allowed_pruning_strategies:
        # The operator's default is always allowed, so the request named this strategy.
        field = "pruning.strategy" if given else "preset"
        allowed = ", ".join(settings.allowed_pruning_strategies)
        asked = given or f"{options.preset} (strategy {strategy.value})"
        raise InvalidRequestError(
            f"speculative.{field} is {asked}; this server allows the strategies {allowed}",
            param=f"speculative.{field}",
        )
    return strategy


def given_or(value: ValueT | None, default: ValueT) -> ValueT:
    """Returns the value, or ``default`` if the value is None."""
    return default if value is None else value
