"""One measurement repeated: all its answers, and how noisy runs are."""

from __future__ import annotations

from typing import Any

import pytest

from bench.repeats import all_records, run_noise


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


def test_all_runs_count() -> None:
    assert len(all_records(REPEATS)) == 9
    assert all_records(REPEATS[:1]) == REPEATS[0]


def test_noise_is_the_mean_distance_of_runs_from_their_mean() -> None:
    noise = run_noise(REPEATS, "vpsd", {"a"})
    assert noise == pytest.approx(100 * (7 / 17 + 13 / 17 + 6 / 17) / 3)
    assert run_noise(REPEATS[:1], "vpsd", {"a"}) is None


def test_files_of_different_answers_are_refused() -> None:
    other = [{**record, "num_tokens": 8} for record in REPEATS[1]]
    with pytest.raises(ValueError, match="not the same answer"):
        all_records([REPEATS[0], other])
    with pytest.raises(ValueError, match="not the same answer"):
        all_records([REPEATS[0], REPEATS[1][:2]])
