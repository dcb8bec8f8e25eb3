"""Options of speculative decoding from the request, its preset and the operator's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.answer.plan import SpeculationPlan
from gateway.api.media_schemas import field_error
from gateway.api.schemas import SpeculationOptions
from gateway.common.config import GatewaySettings
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
    given = options.model_dump(include={"gamma", "max_draft_tokens", "guesses"}, exclude_none=True)
    for name, value in given.items():
        if isinstance(value, int) and value > most:
            raise field_error(f"speculative.{name}", f"is {value}; this server allows {most}")
    by_default = Pruning(
        PruningStrategy(settings.pruning_strategy),
        settings.pruning_ratio,
        min_visual_tokens=settings.pruning_min_visual_tokens,
    )
    default = SpeculationPlan(settings.policy, settings.gamma, most, by_default)
    plan = PRESETS[options.preset] if options.preset else default
    plan = replace(
        plan,
        policy_name=options.policy or plan.policy_name,
        pruning=_pruning(options, plan.pruning, settings.allowed_pruning_strategies),
        is_default=not (
            options.preset or options.policy or options.gamma or options.max_draft_tokens
        ),
        **{"max_draft_tokens": most, **given},
    )
    return plan if plan.gamma == "auto" else replace(plan, gamma=min(plan.gamma, most))


def _pruning(options: SpeculationOptions, published: Pruning, allowed: Sequence[str]) -> Pruning:
    given = options.pruning.model_dump(exclude_none=True)
    if given.keys() & {"strategy", "ratio"}:  # whoever says how to prune wants it of any prompt
        given.setdefault("min_visual_tokens", 0)
    pruning = replace(published, **given)
    name = pruning.strategy.value
    if name not in allowed:  # the operator's default is, so the request named this strategy
        field, asked = "pruning.strategy", name
        if options.pruning.strategy is None:
            field, asked = "preset", f"{options.preset} (strategy {name})"
        why = f"is {asked}; this server allows the strategies {', '.join(allowed)}"
        raise field_error(f"speculative.{field}", why)
    return pruning
