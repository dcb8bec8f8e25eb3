"""Figures of a load, from answers and counters as they come."""

from __future__ import annotations

from typing import Any

import pytest

from bench.load_client import LoadAnswer, LoadRun
from bench.load_figures import (
    Reading,
    parse_samples,
    percentile,
    service_figures,
    summarise_load,
    typical_lines,
)
from bench.load_page import table

FIGURES = {
    "num_draft_tokens": 8,
    "num_accepted_tokens": 6,
    "num_forwards": 2,
    "num_drafted_tokens": 10,
    "num_dropped_tokens": 1,
}


def answer(asked_s: float, *piece_s: float, clip_index: int = 0, num_tokens: int = 5) -> LoadAnswer:
    return LoadAnswer(clip_index, asked_s, piece_s, tuple(range(num_tokens)), FIGURES)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.5)) == (
        50.0,
        99.0,
        7.0,
    )
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_an_answers_times_are_from_its_request_and_between_its_pieces() -> None:
    one = answer(10.0, 10.5, 10.7, 11.3)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.8 / 4)
    assert one.gaps_s == pytest.approx([0.2, 0.6])


def test_throughput_counts_the_answers_that_ended_in_the_window() -> None:
    run = LoadRun(num_warm=2)
    run.answers += [answer(0, 1), answer(0, 2), answer(1, 3), answer(2, 4), answer(3, 6)]
    line = summarise_load(run, {0: tuple(range(5))}, {})
    assert line["num_answers"] == 3
    assert line["seconds"] == 4
    assert line["tokens_per_s"] == pytest.approx(15 / 4)
    assert line["answers_per_s"] == pytest.approx(3 / 4)
    assert line["tokens_per_forward"] == 4
    assert line["acceptance_rate"] == 0.75


def test_an_answer_that_differs_from_its_clips_reference_is_not_equal() -> None:
    run = LoadRun(num_warm=1)
    run.answers += [answer(0, 1), answer(0, 2, 3), answer(0, 3, 4, clip_index=1)]
    line = summarise_load(run, {0: tuple(range(5)), 1: (9, 9)}, {})
    assert (line["num_equal"], line["num_answers"]) == (1, 2)


def test_samples_with_labels_and_comments_are_passed_over() -> None:
    text = '# HELP a_total x\na_total 3.0\nb_bucket{le="1"} 4\nb_sum 0.5\n'
    assert parse_samples(text) == {"a_total": 3.0, "b_sum": 0.5}


def reading(at_s: float, factor: float) -> Reading:
    samples = {
        "hippo_forward_seconds_count": 10 * factor,
        "hippo_forward_seconds_sum": 0.1 * factor,
        "hippo_rows_total": 70 * factor,
        "hippo_forward_sequences_total": 40 * factor,
        "hippo_device_busy_seconds_total": 0.5 * factor,
        "hippo_device_prefill_seconds_total": 0.25 * factor,
    }
    names = ("target", "draft", "gateway", "clients")
    return Reading(at_s, {"target": samples, "draft": {}}, dict.fromkeys(names, 0.5 * factor))


def test_what_the_services_did_is_the_rise_of_their_counters() -> None:
    figures = service_figures(reading(0, 1), reading(2, 3))
    target, draft = figures["target"], figures["draft"]
    assert target["rows_per_forward"] == 7
    assert target["sequences_per_forward"] == 4
    assert target["forward_ms"] == pytest.approx(10)
    assert (target["busy"], target["prefill"]) == (0.5, 0.25)
    assert figures["cpu"]["gateway"] == 0.5
    assert draft["rows_per_forward"] is None


def test_the_table_has_a_line_a_load() -> None:
    run = LoadRun(num_warm=1)
    run.answers += [answer(0, 1), answer(0, 2)]
    services = service_figures(reading(0, 1), reading(2, 3))
    line = {"num_clients": 1, **summarise_load(run, {0: ()}, services)}
    lines = [{"system": system, **line} for system in ("adaptive", "target-only", "adaptive")]
    result: dict[str, Any] = {
        "kind": "short",
        "dtype": "float32",
        "temperature": 0.0,
        "loads": typical_lines(lines),
    }
    assert table(result).row_count == 2


def test_the_typical_run_of_a_load_is_that_of_median_throughput() -> None:
    speeds = (("a", 1, 5.0), ("a", 1, 9.0), ("a", 1, 7.0), ("a", 2, 1.0))
    lines = [
        {
            "system": system,
            "num_clients": count,
            "tokens_per_s": speed,
            "num_equal": 2,
            "num_answers": 3,
        }
        for system, count, speed in speeds
    ]
    first, second = typical_lines(lines)
    assert (first["tokens_per_s"], first["tokens_per_s_range"]) == (7.0, [5.0, 9.0])
    assert (first["num_equal"], first["num_answers"], first["num_runs"]) == (6, 9, 3)
    assert second["tokens_per_s"] == 1.0
