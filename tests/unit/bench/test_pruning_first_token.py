"""Time to first token: what is asked, and how repeats become a ratio."""

from __future__ import annotations

import pytest

from bench.client import Answer
from bench.pruning.first_token import Measured, first_token_rows, first_token_systems
from bench.systems import TARGET_ONLY
from gateway.schemas import SpeculationOptions


def measured(clip: str, system: str, ttft_s: float, late_ms: float | None = None) -> Measured:
    timings = {
        "selection": 0.0 if system == TARGET_ONLY else 3.0,
        "target_prefill": 450.0,
        "first_block_after_first_token": late_ms,
    }
    answer = Answer(
        text="", asked_s=0.0, piece_s=(ttft_s,), token_ids=(1,), figures={"timings_ms": timings}
    )
    return Measured(clip, system, answer)


def test_every_system_is_a_request_that_the_gateway_takes() -> None:
    systems = first_token_systems()
    assert len({system.name for system in systems}) == len(systems)
    for system in systems:
        SpeculationOptions.model_validate(system.speculative)


def test_medians_are_compared_clip_by_clip() -> None:
    alone, pruned = first_token_rows(
        [
            *(measured("a", TARGET_ONLY, seconds) for seconds in (1.0, 1.0, 9.0, 1.0)),
            *(measured("b", TARGET_ONLY, seconds) for seconds in (2.0, 2.0)),
            *(measured("a", "pruned", seconds, -30.0) for seconds in (1.1, 1.1, 7.0)),
            measured("b", "pruned", 2.6, 5.0),
        ]
    )
    assert pruned["ttft_ratio"]["mean"] == pytest.approx((1.1 + 1.3) / 2)
    assert pruned["num_requests"] == 4 and pruned["first_block_ready"] == 0.75
    assert pruned["first_block_late_ms"] == -30.0 and pruned["selection_ms"] == 3.0
    assert pruned["draft_prefill_ms"] is None
    assert "first_block_ready" not in alone
    assert alone["ttft_ms"] == pytest.approx(1500.0)


def test_a_first_block_that_never_came_was_not_ready() -> None:
    alone = [measured("a", TARGET_ONLY, 1.0)] * 2
    _, lost = first_token_rows([*alone, measured("a", "lost", 1.0)])
    assert lost["first_block_ready"] == 0.0 and lost["first_block_late_ms"] is None


def test_target_only_stands_against_itself() -> None:
    times = [1.0, 1.2] * 3
    (alone,) = first_token_rows([measured("a", TARGET_ONLY, seconds) for seconds in times])
    assert alone["ttft_ratio"]["mean"] == pytest.approx(1.2)
