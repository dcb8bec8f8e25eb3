"""Answers through several gateways, from answers to rows."""

from __future__ import annotations

import pytest

from bench.base.cells import cells
from bench.compare import COLUMNS, compare
from hippo.client.answers import Answer


def answer(decode_ms: float, *, token_ids: tuple[int, ...] = (1, 2, 3)) -> Answer:
    """An answer that took 50 ms longer from the request to its end."""
    verdicts = [{"wait": 9.0}, {"wait": 1.0}, {"wait": 2.0}]  # the first is the prefill's
    return Answer(
        text="text",
        asked_s=1.0,
        piece_s=(1.01, 1.05 + decode_ms / 1000),
        token_ids=token_ids,
        figures={
            "timeline_ms": {"verdicts": verdicts},
            "timings_ms": {"decode": decode_ms},
            "num_blocks": 5,
        },
    )


def test_each_gateway_is_held_against_the_first_answer_by_answer() -> None:
    first = [answer(10.0), answer(30.0)]
    second = [answer(5.0), answer(60.0, token_ids=(1, 2, 4))]
    rows = compare(["", ""], [first, second])
    assert [row["num_equal"] for row in rows] == [2, 1]
    assert [row["ms_per_token"] for row in rows] == pytest.approx([10.0, 16.25])
    assert rows[0]["decode"]["mean"] == rows[0]["decode"]["low"] == 1.0
    assert rows[1]["decode"]["mean"] == pytest.approx(1.25)
    assert (rows[1]["decode"]["minimum"], rows[1]["decode"]["maximum"]) == (0.5, 2.0)
    assert rows[1]["end_to_end"]["minimum"] == pytest.approx(55 / 60, abs=1e-4)
    assert (rows[0]["num_forwards"], rows[0]["num_blocks"], rows[0]["wait_ms"]) == (2, 5, 3.0)


def test_the_table_says_what_each_gateway_was_given() -> None:
    rows = compare(["", "--gamma 3"], [[answer(10.0)], [answer(5.0)]])
    first, second = cells(COLUMNS, rows)
    assert (first[0], second[0]) == ("(defaults)", "--gamma 3")
    assert second[5] == "0.500 [0.500, 0.500]"
