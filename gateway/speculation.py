"""Options of speculative decoding from the request, its preset and the operator's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from gateway.config import GatewaySettings
from gateway.schemas import SpeculationOptions
from hippo.errors import InvalidRequestError
from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import Policy, make_policy
from hippo.types import Pruning, PruningStrategy

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Preset:
    """The options of a published system; they override the operator's defaults."""

    policy_name: str
    pruning_strategy: PruningStrategy
    pruning_ratio: float


PRESETS = {
    "hippo": Preset("vpsd", PruningStrategy.HOLISTIC, 0.9),
    "specvlm": Preset("serial", PruningStrategy.SPECVLM, 0.9),
}


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """The options of speculative decoding of one request, within the operator's limits."""

    policy_name: str
    gamma: int
    max_draft_tokens: int
    pruning: Pruning
    is_default: bool = False  # the request sets no policy, preset or draft length

    def make_policy(self, times: PairTimes | None = None) -> Policy:
        """Returns the policy of one sequence; ``times`` are earlier measurements of the pair."""
        return make_policy(
            self.policy_name,
            gamma=self.gamma,
            max_draft_tokens=self.max_draft_tokens,
            times=times,
        )

    @property
    def wants_draft(self) -> bool:
        """Whether the policy uses a draft."""
        return self.policy_name != "off"


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
        if value is not None and value > most:
            raise InvalidRequestError(
                f"speculative.{name} is {value}; this server allows {most}",
                param=f"speculative.{name}",
            )
    default = Preset(
        settings.policy, PruningStrategy(settings.pruning_strategy), settings.pruning_ratio
    )
    preset = PRESETS[options.preset] if options.preset else default
    policy_name = options.policy or preset.policy_name
    return SpeculationPlan(
        policy_name=policy_name,
        gamma=min(given_or(options.gamma, settings.gamma), most),
        max_draft_tokens=given_or(options.max_draft_tokens, most),
        pruning=Pruning(
            strategy=_pruning_strategy(options, preset, settings),
            ratio=given_or(options.pruning.ratio, preset.pruning_ratio),
            seed=options.pruning.seed,
            min_visual_tokens=_min_visual_tokens(options, settings),
        ),
        is_default=not (
            options.preset or options.policy or options.gamma or options.max_draft_tokens
        ),
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
    strategy = PruningStrategy(given) if given else preset.pruning_strategy
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
