"""One measurement repeated: which run of an answer counts, and how noisy runs are."""

from __future__ import annotations

from typing import Any

import pytest

from bench.repeats import median_records, run_noise


def run_of(**decodes: list[float]) -> list[dict[str, Any]]:
    """Records of one clip; a system's times in the order in which it was asked."""
    return [
        {
            "clip": "a",
            "system": system,
            "num_tokens": 9,
            "figures": {"timings_ms": {"decode": decode}},
        }
        for system, times in decodes.items()
        for decode in times
    ]


REPEATS = [
    run_of(off=[50.0, 51.0], vpsd=[10.0]),
    run_of(off=[70.0, 52.0], vpsd=[30.0]),
    run_of(off=[53.0, 54.0], vpsd=[11.0]),
]


def decodes(records: Any, system: str) -> list[float]:
    return [r["figures"]["timings_ms"]["decode"] for r in records if r["system"] == system]


def test_the_median_run_of_an_answer_counts_and_both_middle_ones_of_the_baseline() -> None:
    records = median_records(REPEATS)
    assert decodes(records, "vpsd") == [11.0]
    assert decodes(records, "off") == [52.0, 53.0]


def test_a_single_measurement_is_taken_as_it_is() -> None:
    assert decodes(median_records(REPEATS[:1]), "off") == [50.0, 51.0]
    assert run_noise(REPEATS[:1], "vpsd", {"a"}) is None


def test_noise_is_the_mean_distance_of_runs_from_the_median_one() -> None:
    noise = run_noise(REPEATS, "vpsd", {"a"})
    assert noise == pytest.approx(100 * (1 / 11 + 19 / 11 + 0) / 3)


def test_files_of_different_answers_are_refused() -> None:
    other = [{**record, "num_tokens": 8} for record in REPEATS[1]]
    with pytest.raises(ValueError, match="not the same answer"):
        median_records([REPEATS[0], other])
    with pytest.raises(ValueError, match="not the same answer"):
        median_records([REPEATS[0], REPEATS[1][:2]])
