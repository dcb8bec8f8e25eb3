"""The target's step time, from forwards whose costs are known."""

from __future__ import annotations

from typing import Any

import pytest

from bench.step_fit import fit_preemption, fit_step
from hippo.simulation.machine import StepTime

TRUTH = StepTime(one_row_ms=4.0, several_ms=0.5, row_ms=0.2, kilotoken_ms=1.0, row_kilotoken_ms=0.3)
MESSAGE_MS = 0.1


def answer(
    *, num_forwards: int, seed: int, slow: int = -1, time: StepTime = TRUTH
) -> dict[str, Any]:
    """Forwards of many sizes; in every third of them two blocks arrive, and one is held up."""
    verdicts: list[dict[str, float]] = [{"at": 0.0, "rows": 0, "context": 0, "forward": 30.0}]
    blocks: list[dict[str, float]] = []
    now = 0.0
    for k in range(num_forwards):
        rows, context = 1 + (7 * k + seed) % 33, 100 + 5 * k
        num_blocks = 2 * (k % 3 == 0)
        forward = time.ms(rows, context) + MESSAGE_MS * num_blocks + 20.0 * (k == slow)
        blocks += [{"at": now + 1.0}] * num_blocks
        now += forward
        verdicts.append({"at": now, "rows": rows, "context": context, "forward": forward})
    return {"figures": {"timeline_ms": {"verdicts": verdicts, "blocks": blocks}}}


def test_rows_context_and_blocks_are_told_apart_whatever_held_up_a_forward() -> None:
    found = fit_step([answer(num_forwards=40, seed=seed, slow=9) for seed in range(4)])
    assert found is not None
    assert found.message_ms == pytest.approx(MESSAGE_MS, rel=0.02)
    for rows, context in ((1, 100), (2, 300), (8, 150), (33, 250)):
        assert found.time.ms(rows, context) == pytest.approx(TRUTH.ms(rows, context), rel=0.01)


def test_what_is_slow_for_a_while_counts_as_often_as_it_was() -> None:
    fast = StepTime(one_row_ms=4.0, several_ms=0.5, row_ms=0.2)
    slow = StepTime(one_row_ms=6.0, several_ms=0.75, row_ms=0.3)
    records = [answer(num_forwards=66, seed=0, time=time) for time in (fast, slow)]
    found = fit_step(records)
    assert found is not None
    for rows in (1, 8, 33):
        expected = (fast.ms(rows, 0) + slow.ms(rows, 0)) / 2
        assert found.time.ms(rows, 0) == pytest.approx(expected, rel=0.02)


def test_a_calibration_gives_the_shape_and_the_records_its_size() -> None:
    flat = StepTime(one_row_ms=4.0, several_ms=0.5, row_ms=0.2)
    rows = (1.0, 2.0, 8.0, 33.0)
    # The machine was half as fast then, and nothing came between the forwards.
    points = [(n, 2 * (flat.ms(int(n), 0) - 0.5 * (n > 1))) for n in rows]
    records = [answer(num_forwards=40, seed=seed, slow=9, time=flat) for seed in range(4)]
    found = fit_step(records, points, message_ms=MESSAGE_MS)
    assert found is not None and found.message_ms == MESSAGE_MS
    for num_rows in (1, 2, 5, 33):
        expected = flat.ms(num_rows, 0)
        assert found.time.ms(num_rows, 0) == pytest.approx(expected, rel=0.01)


def test_what_blocks_and_verdicts_take_from_the_drafts_core_is_told_apart() -> None:
    blocks: list[dict[str, float]] = []
    verdicts: list[dict[str, float]] = []
    for k in range(40):
        num_verdicts = int(k % 3 == 0)
        verdicts += [{"at": k - 0.5}] * num_verdicts
        blocks.append({"at": float(k), "preempted": 0.3 + 0.9 * num_verdicts})
    record = {"figures": {"timeline_ms": {"verdicts": verdicts, "blocks": blocks}}}
    found = fit_preemption([record])
    assert found is not None
    assert (found.block_ms, found.verdict_ms) == pytest.approx((0.3, 0.9))
    assert fit_preemption([{"figures": {}}]) is None


def test_nothing_is_fitted_without_a_timeline_or_with_few_forwards() -> None:
    assert fit_step([{"figures": {}}] * 50) is None
    assert fit_step([answer(num_forwards=10, seed=0)]) is None
