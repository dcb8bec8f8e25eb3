"""The target's step time, from forwards whose costs are known."""

from __future__ import annotations

from typing import Any

import pytest

from bench.step_fit import fit_cold_start, fit_step, seen_step
from hippo.simulation.machine import StepTime, line_through
from hippo.speculation.virtual_time import start_coldness

TRUTH = StepTime(one_row_ms=4.0, several_ms=0.5, row_ms=0.2, kilotoken_ms=1.0, row_kilotoken_ms=0.3)
MESSAGE_MS = 0.1


def answer(
    *,
    num_forwards: int,
    seed: int,
    slow: int = -1,
    time: StepTime = TRUTH,
    most_rows: int = 33,
    cold_points: tuple[tuple[float, float], ...] = ((1.0, 0.0),),
) -> dict[str, Any]:
    """Forwards of many sizes; in every third of them two blocks arrive, and one is held up. Every
    second one is behind a rest of 8 ms, and half cold."""
    verdicts: list[dict[str, float]] = [{"at": 0.0, "rows": 0, "context": 0, "forward": 30.0}]
    blocks: list[dict[str, float]] = []
    now = 0.0
    for k in range(num_forwards):
        rows, context = 1 + (7 * k + seed) % most_rows, 100 + 5 * k
        num_blocks = 2 * (k % 3 == 0)
        is_cold = k % 2 == 0
        forward = time.ms(rows, context) + MESSAGE_MS * num_blocks + 20.0 * (k == slow)
        forward += line_through(cold_points, rows) * is_cold / 2
        blocks += [{"at": now + 1.0}] * num_blocks
        now += forward
        verdict = {"at": now, "rows": rows, "context": context, "forward": forward}
        verdicts.append({**verdict, "wait": 8.0 * is_cold})
    timings = {"decode": now, "draft_wait": None, "target_wait": 0.0, "target_forward": now}
    return {
        "system": "serial γ=7",
        "clip": f"clip-{seed}",
        "figures": {
            "timeline_ms": {"verdicts": verdicts, "blocks": blocks},
            "timings_ms": timings,
            "num_drafted_tokens": num_forwards,
        },
    }


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


COLD = ((1.0, 0.3), (9.0, 1.4))
FLAT = StepTime(one_row_ms=4.0, several_ms=-0.5, row_ms=0.2)  # two rows take less than one


def test_what_the_records_show_is_taken_from_them_and_the_rest_from_a_calibration() -> None:
    # The machine was half as fast when it was calibrated, and slower still for four rows.
    rows = (1.0, 2.0, 4.0, 8.0, 16.0, 33.0)
    points = [(n, 2 * FLAT.ms(int(n), 0) * (1.5 if n == 4 else 1.0)) for n in rows]
    records = [
        answer(num_forwards=99, seed=seed, slow=9, time=FLAT, most_rows=9, cold_points=COLD)
        for seed in range(4)
    ]
    found = seen_step(records, points, message_ms=MESSAGE_MS, cold_points=COLD)
    assert found is not None
    for num_rows in (1, 2, 3, 4, 5, 8, 9, 33):
        assert found.ms(num_rows, 0) == pytest.approx(FLAT.ms(num_rows, 0), rel=0.01)


def test_the_first_forwards_behind_a_prompt_are_as_cold_as_the_baseline_says() -> None:
    shares = [0.5 * start_coldness(k) for k in range(40)]
    verdicts: list[dict[str, float]] = [{"at": 0.0, "rows": 0, "context": 0, "forward": 30.0}]
    for k, share in enumerate(shares):
        verdict = {"at": 5.0 * (k + 1), "rows": 1, "context": 9, "wait": 0.0}
        verdicts.append({**verdict, "forward": 4.0 + 2.0 * share})
    timings = {"decode": 200.0, "draft_wait": None, "target_wait": 0.0, "target_forward": 180.0}
    figures = {
        "timeline_ms": {"verdicts": verdicts, "blocks": []},
        "timings_ms": timings,
        "num_drafted_tokens": 0,
    }
    records = [{"system": "target-only", "clip": str(n), "figures": figures} for n in range(20)]
    assert fit_cold_start(records, 2.0) == pytest.approx(0.5, rel=0.02)
    assert fit_cold_start(records, 0.0) == fit_cold_start([{"figures": {}}], 2.0) == 0.0
    found = seen_step(records, [(1.0, 4.0)], cold_points=[(1.0, 2.0)], cold_start=0.5)
    assert found is not None
    assert found.ms(1, 0) == pytest.approx(4.0, rel=0.001)


def test_the_same_few_places_repeated_are_no_more_than_few() -> None:
    slow = FLAT.scaled(3.0)
    often = [answer(num_forwards=99, seed=seed, time=FLAT, most_rows=4) for seed in range(4)]
    last = [answer(num_forwards=9, seed=0, time=slow, most_rows=9) for _ in range(40)]
    points = [(float(n), FLAT.ms(n, 0)) for n in (1, 4, 9)]
    found = seen_step(often + [{**record, "clip": "last"} for record in last], points)
    assert found is not None
    assert found.ms(9, 0) < 2 * FLAT.ms(9, 0)


def test_what_the_draft_takes_while_it_computes_is_taken_off() -> None:
    slower = FLAT.scaled(1.1)
    records = [answer(num_forwards=99, seed=0, time=slower, most_rows=4)]
    found = seen_step(records, [(1.0, 4.0), (4.0, 4.1)], contention=0.1, message_ms=MESSAGE_MS)
    assert found is not None
    assert found.ms(1, 0) == pytest.approx(FLAT.ms(1, 0), rel=0.01)
    assert found.ms(4, 0) == pytest.approx(FLAT.ms(4, 0), rel=0.01)


def test_nothing_is_fitted_without_a_timeline_or_with_few_forwards() -> None:
    assert fit_step([{"figures": {}}] * 50) is None
    assert fit_step([answer(num_forwards=10, seed=0)]) is None
    assert seen_step([{"figures": {}}] * 50, [(1.0, 4.0)]) is None
    assert seen_step([answer(num_forwards=10, seed=0)], [(1.0, 4.0)]) is None
