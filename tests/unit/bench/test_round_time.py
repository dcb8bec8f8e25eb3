"""Where a round's time went, from counts of threads that are known."""

from __future__ import annotations

import pytest

from bench.answers.client import Answer
from bench.shapes.round_time import Times, answer_times, breakdown

_MS = 1_000_000


def test_a_round_is_split_into_what_ran_what_was_ready_and_what_waited_for_a_lock() -> None:
    verdict = {"forward": 8.0, "wait": 1.0, "between": 0.5}
    figures = {
        "timeline_ms": {"verdicts": [{**verdict, "forward": 30.0}, verdict, verdict]},
        "timings_ms": {"decode": 20.0},
        "num_blocks": 6,
    }
    answer = Answer(
        text="text", asked_s=0.0, piece_s=(0.1,), token_ids=(1, 2, 3, 4, 5), figures=figures
    )
    begin: Times = {("target", "device"): (100 * _MS, 7 * _MS), ("gateway", "loop"): (5 * _MS, 0)}
    end: Times = {
        ("target", "device"): (114 * _MS, 9 * _MS),
        ("target", "loop"): (1 * _MS, 0),
        ("gateway", "loop"): (7 * _MS, 0),
    }
    result = breakdown("adaptive", answer_times(answer, begin, end))
    assert (result["num_rounds"], result["tokens_per_round"], result["blocks_per_round"]) == (
        2,
        2.0,
        3.0,
    )
    assert result["round_ms"] == pytest.approx(10.0)
    assert result["ms_per_token"] == pytest.approx(5.0)
    assert result["target"] == pytest.approx(
        {"forward": 8.0, "between forwards": 0.5, "waits for the draft": 1.0, "transport": 0.5}
    )
    assert list(result["device_thread"].values()) == pytest.approx([7.0, 1.0, 0.5])
    assert result["cores"]["target"] == pytest.approx(
        {"target device": 7.0, "target loop": 0.5, "idle": 2.5}
    )
    assert result["cores"]["draft"] == pytest.approx({"gateway loop": 1.0, "idle": 9.0})
