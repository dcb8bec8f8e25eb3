"""Rows by category, with scores."""

from __future__ import annotations

from hippo.client.answers import Answer
from hippo.client.latency import TARGET_ONLY
from hippo.lab.benchmark.question_figures import ALL, records_of, summarise_questions
from hippo.lab.benchmark.video_questions import VideoQuestion

QUESTIONS = [
    VideoQuestion(id="1", video="a", prompt="?", options=("x", "y"), answer="A", category="short"),
    VideoQuestion(id="2", video="a", prompt="?", answer="Two.", category="long"),
    VideoQuestion(id="3", video="a", prompt="?", category="long"),
]
SYSTEMS = [TARGET_ONLY, "adaptive"]


def answer(text: str, decode_s: float) -> Answer:
    figures = {"timings_ms": {"decode": 1e3 * decode_s}, "mean_run_length": 6.0}
    ids = tuple(text.encode())
    return Answer(text=text, asked_s=0, piece_s=(1, 1 + decode_s), token_ids=ids, figures=figures)


ANSWERS = {
    ("1", TARGET_ONLY): answer("A", 3.0),
    ("1", "adaptive"): answer("A", 1.0),
    ("2", TARGET_ONLY): answer("two", 4.0),
    ("2", "adaptive"): answer("too", 1.0),
    ("3", TARGET_ONLY): answer("three", 2.0),
    ("3", "adaptive"): answer("three", 2.0),
}


def test_each_category_has_a_row_per_system_and_all_stand_last() -> None:
    records = records_of(QUESTIONS, ANSWERS, SYSTEMS, temperature=0.0)
    rows = summarise_questions(QUESTIONS, ANSWERS, SYSTEMS, records=records)
    assert [(row["category"], row["system"]) for row in rows] == [
        (category, system) for category in ("long", "short", ALL) for system in SYSTEMS
    ]
    alone, pair = rows[-2:]
    assert pair["decode_speedup"]["mean"] == round((3 + 4 + 1) / 3, 4)
    assert pair["end_to_end_speedup"]["mean"] == round((4 / 2 + 5 / 2 + 1) / 3, 4)
    assert alone["decode_speedup"]["mean"] == 1.0 and pair["mean_run_length"] == 6.0
    assert [(row["num_right"], row["num_scored"], row["num_unlike"]) for row in rows[-2:]] == [
        (2, 2, 0), (1, 2, 1),
    ]  # fmt: skip
    assert (pair["num_equal"], alone["num_equal"]) == (2, 3)


def test_a_server_that_is_no_gateway_has_times_and_a_score() -> None:
    (_, _, row) = summarise_questions(QUESTIONS, ANSWERS, ["adaptive"], records=None)
    assert (row["system"], row["num_right"], row["num_scored"]) == ("adaptive", 1, 2)
    assert row["ttft_ms"]["mean"] == 1000.0 and row["num_unlike"] == 0
