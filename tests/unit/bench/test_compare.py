"""Answers through several gateways, from samples that are known to rows."""

from __future__ import annotations

import pytest

from bench.answers.client import Answer
from bench.compare import GatewayAnswer, cells, compare, sample_of


def sample(decode_ms: float, *, token_ids: tuple[int, ...] = (1, 2, 3)) -> GatewayAnswer:
    return GatewayAnswer(len(token_ids), decode_ms, decode_ms + 50.0, 2, 4, 1.0, token_ids)


def test_a_sample_leaves_the_prefill_out() -> None:
    verdicts = [{"wait": 9.0}, {"wait": 1.0}, {"wait": 2.0}]
    answer = Answer(
        text="text",
        asked_s=1.0,
        piece_s=(1.1, 1.5),
        token_ids=(1, 2, 3, 4),
        figures={
            "timeline_ms": {"verdicts": verdicts},
            "timings_ms": {"decode": 30.0},
            "num_blocks": 5,
        },
    )
    found = sample_of(answer)
    assert (found.num_tokens, found.num_forwards, found.num_blocks) == (4, 2, 5)
    assert found.wait_ms == 3.0
    assert found.decode_ms == 30.0
    assert found.end_to_end_ms == pytest.approx(500.0)


def test_each_gateway_is_held_against_the_first_answer_by_answer() -> None:
    first = [sample(10.0), sample(30.0)]
    second = [sample(5.0), sample(60.0, token_ids=(1, 2, 4))]
    rows = compare([first, second])
    assert [row["num_equal"] for row in rows] == [2, 1]
    assert [row["ms_per_token"] for row in rows] == pytest.approx([10.0, 16.25])
    assert rows[0]["decode"]["mean"] == rows[0]["decode"]["low"] == 1.0
    assert rows[1]["decode"]["mean"] == pytest.approx(1.25)
    assert (rows[1]["decode"]["minimum"], rows[1]["decode"]["maximum"]) == (0.5, 2.0)


def test_the_table_says_what_each_gateway_was_given() -> None:
    rows = compare([[sample(10.0)], [sample(5.0)]])
    first, second = cells({"settings": ["", "--gamma 3"], "rows": rows})
    assert (first[0], second[0]) == ("(defaults)", "--gamma 3")
    assert second[5] == "0.500 [0.500, 0.500]"
