"""Pruning strategies and presets: what a request gets, and what it is refused."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.answer.plan import SpeculationPlan
from gateway.api.schemas import SpeculationOptions
from gateway.api.translate import speculation_plan
from gateway.common.config import GatewaySettings
from hippo.base.config import SettingsError, load_settings
from hippo.errors import InvalidRequestError
from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import serial_pace, vpsd_pace
from hippo.types import Pruning, PruningStrategy, SpatialScore

SETTINGS = GatewaySettings(target=("localhost:1",))


def _plan(settings: GatewaySettings = SETTINGS, **fields: Any) -> SpeculationPlan:
    return speculation_plan(SpeculationOptions.model_validate(fields), settings)


def _settings(*argv: str) -> GatewaySettings:
    return load_settings(
        GatewaySettings, ["--target", "a:1", *argv], {}, env_prefix="X", prog="p", description=""
    )


@pytest.mark.parametrize("strategy", list(PruningStrategy))
def test_every_strategy_can_be_asked_for(strategy: PruningStrategy) -> None:
    plan = _plan(pruning={"strategy": strategy.value, "ratio": 0.3, "seed": 4})
    assert plan.pruning == Pruning(strategy, 0.3, 4)
    assert _settings("--pruning-strategy", strategy.value).pruning_strategy == strategy.value


HIPPO = Pruning(
    PruningStrategy.HOLISTIC,
    0.9,
    spatial_score=SpatialScore.VARIANCE,
    spread=0.0,
    score_layer_share=1.0,
)
OWN_SCORES: Any = {"spatial_score": "contrast", "spread": 0.1, "score_layer_share": 0.5}
QUESTION: Any = {"causal_attention": False, "compacted_positions": False}
SPECVLM = Pruning(
    PruningStrategy.SPECVLM,
    0.9,
    score_layer_share=1.0,
    causal_attention=True,
    compacted_positions=True,
)


RANDOM = Pruning(PruningStrategy.RANDOM, 0.2, min_visual_tokens=100)  # the operator's


@pytest.mark.parametrize(
    ("fields", "policy_name", "pruning"),
    [
        ({}, "adaptive", RANDOM),
        ({"gamma": 2}, "adaptive", RANDOM),
        ({"pruning": {"ratio": 0.5}}, "adaptive", Pruning(PruningStrategy.RANDOM, 0.5)),
        ({"pruning": {"strategy": "uv"}}, "adaptive", Pruning(PruningStrategy.UV, 0.2)),
        ({"preset": "hippo"}, "vpsd", HIPPO),
        ({"preset": "hippo", "policy": "adaptive"}, "adaptive", HIPPO),
        ({"preset": "hippo", "pruning": {"ratio": 0.0}}, "vpsd", replace(HIPPO, ratio=0.0)),
        (
            {"preset": "hippo", "pruning": {"min_visual_tokens": 7}},
            "vpsd",
            replace(HIPPO, min_visual_tokens=7),
        ),
        (
            {"preset": "hippo", "guesses": True, "pruning": OWN_SCORES},
            "vpsd",
            replace(HIPPO, **{**OWN_SCORES, "spatial_score": SpatialScore.CONTRAST}),
        ),
        ({"preset": "specvlm"}, "serial", SPECVLM),
        (
            {"preset": "specvlm", "pruning": {"strategy": "none"}},
            "serial",
            replace(SPECVLM, strategy=PruningStrategy.NONE),
        ),
        ({"preset": "specvlm", "pruning": QUESTION}, "serial", replace(SPECVLM, **QUESTION)),
    ],
)
def test_a_request_goes_before_its_preset_and_that_before_the_operators_defaults(
    fields: dict[str, Any], policy_name: str, pruning: Pruning
) -> None:
    settings = replace(SETTINGS, pruning_strategy="random", pruning_ratio=0.2)
    plan = _plan(replace(settings, pruning_min_visual_tokens=100), **fields)
    assert (plan.policy_name, plan.pruning) == (policy_name, pruning)
    assert plan.guesses == fields.get("guesses", "preset" not in fields)


def test_the_draft_length_may_follow_the_measured_times() -> None:
    times = PairTimes()
    times.draft_step.observe_time(2e6)
    times.forwards.observe_forward(1, 20e6)
    for asked in (
        _plan(preset="hippo"),
        _plan(policy="vpsd", gamma="auto"),
        _plan(_settings("--policy", "vpsd", "--gamma", "auto")),
    ):
        assert asked.gamma == "auto"
        assert asked.make_policy(times).pace == vpsd_pace(10)
    assert _plan(preset="hippo", gamma=7).make_policy(times).pace == vpsd_pace(7)
    assert _plan(preset="specvlm").make_policy(times).pace == serial_pace(5)
    assert _plan(preset="specvlm", gamma=3).make_policy(times).pace == serial_pace(3)
    assert not _plan(gamma="auto").is_default


@pytest.mark.parametrize("gamma", ["best", 0, -3, 2.5])
def test_a_draft_length_is_a_number_or_auto(gamma: object) -> None:
    with pytest.raises(ValidationError) as refused:
        _plan(gamma=gamma)
    [error] = refused.value.errors()
    assert error["loc"] == ("gamma",)
    assert error["msg"] == f'expected a number of at least 1, or "auto", not {gamma!r}'
    with pytest.raises(SettingsError, match=r"gamma.*auto"):
        _settings("--gamma", str(gamma))


def test_strategies_that_the_operator_does_not_allow_are_refused_by_name() -> None:
    settings = _settings(
        *("--allowed-pruning-strategies", "none,uniform,specvlm", "--pruning-strategy", "none")
    )
    assert _plan(settings).pruning.strategy is PruningStrategy.NONE
    assert _plan(settings, preset="specvlm").pruning.strategy is PruningStrategy.SPECVLM
    with pytest.raises(
        InvalidRequestError, match="is random; this server allows the strategies none, uniform, s"
    ) as refused:
        _plan(settings, pruning={"strategy": "random"})
    assert refused.value.param == "speculative.pruning.strategy"
    with pytest.raises(InvalidRequestError, match=r"is hippo \(strategy holistic\)") as refused:
        _plan(settings, preset="hippo")
    assert refused.value.param == "speculative.preset"
    allowed = _plan(settings, preset="hippo", pruning={"strategy": "uniform"})
    assert (allowed.policy_name, allowed.pruning.strategy) == ("vpsd", PruningStrategy.UNIFORM)


def test_speculation_is_chosen_within_the_operators_limits() -> None:
    assert not _plan(policy="off").wants_draft
    most = SETTINGS.max_draft_tokens
    with pytest.raises(InvalidRequestError, match=f"this server allows {most}"):
        _plan(max_draft_tokens=most + 1)
