"""From answers to figures and to tables."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from hippo.client.answers import Answer
from hippo.client.figures import notes_on, percentile, spread, summarise, summarise_alone
from hippo.client.latency import TARGET_ONLY, Record
from hippo.client.tables import latency_table, load_table, questions_table
from hippo.errors import HippoError
from hippo.lab.benchmark.load import Ended, LoadRun
from hippo.lab.benchmark.load_figures import summarise_load
from hippo.lab.benchmark.question_figures import page_of, table_of

FIGURES = {
    "num_draft_tokens": 8,
    "num_accepted_tokens": 6,
    "num_forwards": 2,
    "num_drafted_tokens": 10,
    "num_dropped_tokens": 1,
}


IDS = tuple(range(5))


def ended(asked_s: float, *piece_s: float, index: int = 0, **fields: Any) -> Ended:
    fields = {"token_ids": IDS, "figures": FIGURES, **fields}
    answer = Answer(text="", asked_s=asked_s, piece_s=piece_s, **fields)
    return Ended(index, answer.ended_s, answer)


def record(system: str, decode_s: float, *, ids: tuple[int, ...] = (1, 2, 3)) -> Record:
    figures = {
        "timings_ms": {"decode": 1e3 * decode_s, "target_step": 4.0, "target_wait": None},
        "acceptance_rate": 0.5,
    }
    answer = Answer(
        text="", asked_s=0.0, piece_s=(0.1, 0.1 + decode_s), token_ids=ids, figures=figures
    )
    return Record("a.mp4", system, 0.0, answer, 2.0, 2.2, (1, 2, 3))


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99)] == [50.0, 99.0]
    assert percentile([7.0], 0.5) == 7.0
    assert set(spread([2.0, 2.0]).values()) == {2.0}
    for nothing in (lambda: percentile([], 0.5), lambda: spread([])):
        with pytest.raises(ValueError, match="no values"):
            nothing()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20))
def test_a_bootstrap_interval_lies_around_the_mean_and_within_the_values(
    values: list[float],
) -> None:
    found = spread(values)
    assert found["minimum"] <= found["low"] <= found["high"] <= found["maximum"]
    assert found["low"] <= found["mean"] + 1e-4 and found["mean"] <= found["high"] + 1e-4
    assert found == spread(values)


def test_an_answer_of_one_token_has_no_speedup_of_decoding() -> None:
    assert record("adaptive", 0.0, ids=(1,)).decode_speedup == 1.0


def test_unequal_answers_and_missing_drafts_are_told() -> None:
    def told(**fields: Any) -> list[str]:
        one = record("adaptive", 1.0, ids=fields.pop("ids", (1, 2, 3)))
        figures = {**one.figures, "policy": "adaptive", "draft_used": True, "draft_problem": ""}
        return notes_on([replace(one, answer=replace(one.answer, figures={**figures, **fields}))])

    assert told() == []
    assert told(ids=(1,)) == [
        "1 of 1 answers differ from target-only's: expected in bfloat16 at times, never in float32"
    ]
    lost = {"draft_used": False, "draft_problem": "it stalled"}
    assert told(**lost) == ["no draft took part in some answers: it stalled"]
    assert told(**lost, policy="off") == []


def test_speedups_are_against_target_only_on_the_same_question() -> None:
    alone, pair = summarise(
        [record(TARGET_ONLY, 2.0), record("adaptive", 0.5), record("adaptive", 1.0, ids=(1, 2))]
    )
    assert (alone["system"], pair["system"]) == (TARGET_ONLY, "adaptive")
    assert pair["decode_speedup"]["mean"] == pytest.approx((4 + 2) / 2)
    assert pair["end_to_end_speedup"]["mean"] == pytest.approx(
        (2.2 / 0.6 + 2.2 / 1.1) / 2, abs=1e-3
    )
    assert pair["first_token_share"]["mean"] == pytest.approx((0.1 / 0.2 + 0.1 / 0.2) / 2)
    assert (pair["num_equal"], pair["num_answers"]) == (1, 2)
    assert pair["decode_ms_per_token"] == pytest.approx((250 + 1000) / 2)
    assert (pair["target_step_ms"], pair["target_wait_ms"]) == (4.0, None)
    assert pair["acceptance_rate"] == 0.5 and pair["mean_run_length"] is None


def test_a_server_that_tells_only_text_is_timed_by_the_clients_clock() -> None:
    usage = {"completion_tokens": 5}
    answers = [
        Answer(text="", asked_s=0.0, piece_s=(0.5, 1.5), usage=usage),
        Answer(text="", asked_s=1.0, piece_s=(1.3, 2.0)),
    ]
    row = summarise_alone("plain", answers)
    assert row["ttft_ms"]["mean"] == pytest.approx(400)
    assert row["ms_per_token"]["mean"] == pytest.approx((250 + 700) / 2)
    assert row["tokens_per_s"]["mean"] == pytest.approx((5 / 1.5 + 2 / 1.0) / 2, abs=1e-3)
    assert row["counted_by"] == ["pieces", "usage"]
    assert row["num_cached_tokens"] is None


References = dict[int, tuple[int, ...]]


def line_of(requests: list[Ended], references: References, num_warm: int = 1) -> dict[str, Any]:
    """The line of a load with these requests."""
    run = LoadRun(num_warm=num_warm, ended=requests)
    return summarise_load(run, references)


def test_throughput_counts_the_answers_that_ended_in_the_window() -> None:
    requests = [ended(0, 1), ended(0, 2), ended(1, 3), ended(2, 4), ended(3, 6)]
    line = line_of(requests, {0: IDS}, num_warm=2)
    assert (line["num_answers"], line["num_equal"], line["num_errors"]) == (3, 3, 0)
    assert line["seconds"] == 4
    assert line["tokens_per_s"] == pytest.approx(15 / 4)
    assert line["answers_per_s"] == pytest.approx(3 / 4)
    assert line["tokens_per_forward"] == 4
    assert line["acceptance_rate"] == 0.75


def test_an_answer_that_differs_from_its_questions_reference_is_not_equal() -> None:
    requests = [ended(0, 1), ended(0, 2, 3), ended(0, 3, 4, index=1)]
    line = line_of(requests, {0: IDS, 1: (9, 9)})
    assert (line["num_equal"], line["num_answers"]) == (1, 2)


def test_failed_requests_are_counted_by_their_words() -> None:
    failed = [Ended(0, 1.5, None, "busy"), Ended(0, 2.5, None, "busy"), Ended(0, 4.0, None, "gone")]
    line = line_of([ended(0, 1), failed[0], ended(0, 2), *failed[1:]], {})
    assert line["errors"] == {"busy": 2, "gone": 1}
    assert (line["num_answers"], line["num_errors"], line["num_equal"]) == (1, 3, None)
    assert line["seconds"] == 3.0
    with pytest.raises(HippoError, match="no request was answered: busy"):
        line_of([ended(0, 1), failed[0]], {})


def shown(table: Table, width: int = 200) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(table)
    return out.getvalue()


ROWS = summarise([record(TARGET_ONLY, 2.0), record("adaptive", 0.5), record("adaptive", 1.0)])


def test_speedups_stand_with_their_intervals_and_fit_into_80_columns() -> None:
    text = shown(latency_table("short", ROWS), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert re.search(r"adaptive .*3\.00", text) and "[2.00, 4.00]" in text


def test_rows_of_questions_fit_into_80_columns_by_category() -> None:
    row = {"num_right": 1234, "num_scored": 2700, "category": "short", "system": TARGET_ONLY}
    rows = [{**ROWS[1], **row, "num_answers": 2700, "num_equal": 2700}]
    rows += [{**rows[0], "system": "vpsd γ=15"}, {**rows[0], "category": "long", "num_scored": 0}]
    table = table_of(rows)
    text = shown(questions_table("many", table), width=80)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert text.count("short") == 1 and "45.7%" in text
    page = page_of("many", table).splitlines()
    assert page[3] == "| --- | --- |" + " ---: |" * (len(table[0]) - 2)
    assert "1234/2700 45.7%" in page[4] and "3.00 [2.00, 4.00]" in page[4]
    assert page[6].startswith("| long |") and page[6].endswith("| - |")


def test_a_load_has_a_line_and_shows_only_what_is_known() -> None:
    line = line_of([ended(0, 1), ended(0, 2, 3), ended(0, 3, 4)], {0: IDS}) | {"num_clients": 4}
    text = shown(load_table("load", [line | {"system": name} for name in ("adaptive", "off")]), 80)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "accept" in text and "2/2" in text
    plain = line | {"system": "plain", "acceptance_rate": None, "num_equal": None}
    text = shown(load_table("load", [plain]))
    assert "accept" not in text and "equal" not in text
