"""Options of speculative decoding from the request, its preset and the operator's defaults."""

from __future__ import annotations

from dataclasses import replace

from gateway.answer.plan import SpeculationPlan
from gateway.api.schemas import PruningOptions, SpeculationOptions
from gateway.common.config import GatewaySettings
from hippo.errors import InvalidRequestError
from hippo.speculation.policies import DEFAULT_GAMMA, MAX_DRAFT_TOKENS
from hippo.types import Pruning, PruningStrategy, SpatialScore

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
    "hippo": SpeculationPlan("vpsd", "auto", MAX_DRAFT_TOKENS, _HOLISTIC, guesses=False),
    "specvlm": SpeculationPlan(
        "serial", DEFAULT_GAMMA, MAX_DRAFT_TOKENS, _TWO_STAGES, guesses=False
    ),
}
"""Published systems, which override the operator's defaults. docs/algorithms.md says how hippo's
form of each system differs from its publication."""


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
    by_default = Pruning(
        PruningStrategy(settings.pruning_strategy),
        settings.pruning_ratio,
        min_visual_tokens=settings.pruning_min_visual_tokens,
    )
    default = SpeculationPlan(settings.policy, settings.gamma, most, by_default)
    plan = PRESETS[options.preset] if options.preset else default
    given = options.model_dump(include={"gamma", "max_draft_tokens", "guesses"}, exclude_none=True)
    plan = replace(
        plan,
        policy_name=options.policy or plan.policy_name,
        pruning=_pruning(options.pruning, plan.pruning),
        is_default=not (
            options.preset or options.policy or options.gamma or options.max_draft_tokens
        ),
        **{"max_draft_tokens": most, **given},
    )
    _check_allowed(plan.pruning.strategy, options, settings)
    return plan if plan.gamma == "auto" else replace(plan, gamma=min(plan.gamma, most))


def _pruning(options: PruningOptions, published: Pruning) -> Pruning:
    given = options.model_dump(exclude_none=True)
    if "strategy" in given:
        given["strategy"] = PruningStrategy(given["strategy"])
    if "spatial_score" in given:
        given["spatial_score"] = SpatialScore(given["spatial_score"])
    if given.keys() & {"strategy", "ratio"}:  # whoever says how to prune wants it of any prompt
        given.setdefault("min_visual_tokens", 0)
    return replace(published, **given)


def _check_allowed(
    strategy: PruningStrategy, options: SpeculationOptions, settings: GatewaySettings
) -> None:
    if strategy.value in settings.allowed_pruning_strategies:
        return
    # The operator's default is always allowed, so the request named this strategy.
    given = options.pruning.strategy
    field = "pruning.strategy" if given else "preset"
    allowed = ", ".join(settings.allowed_pruning_strategies)
    asked = given or f"{options.preset} (strategy {strategy.value})"
    raise InvalidRequestError(
        f"speculative.{field} is {asked}; this server allows the strategies {allowed}",
        param=f"speculative.{field}",
    )
