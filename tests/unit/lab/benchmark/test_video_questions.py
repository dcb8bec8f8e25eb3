"""Files of questions, right answers, and rows by category with scores."""

import json
from pathlib import Path
from typing import Any

import pytest

from hippo.client.answers import Answer
from hippo.client.latency import TARGET_ONLY
from hippo.errors import InvalidRequestError
from hippo.lab.benchmark.question_figures import ALL, records_of, summarise_questions
from hippo.lab.benchmark.video_questions import VideoQuestion, read_questions

COLOURS = ("Red", "Dark blue", "Blue")


def written(folder: Path, *lines: str | dict[str, Any]) -> Path:
    """A file of questions beside `a.mp4`."""
    (folder / "a.mp4").write_bytes(b"frames")
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path = folder / "questions.jsonl"
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def asked(**fields: Any) -> dict[str, Any]:
    return {"id": "1", "video": "a.mp4", "question": "What colour?", **fields}


def test_a_question_with_options_is_sent_with_them_and_scored_by_letter(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        asked(id=7, options=COLOURS, answer="Blue", category="colour"),
        "",
        asked(id="b", prompt="As it is.", options=COLOURS, answer="A"),
    )
    first, second = read_questions(path)
    assert (first.id, first.answer, first.category) == ("7", "C", "colour")
    assert first.prompt == (
        "What colour?\nA. Red\nB. Dark blue\nC. Blue\n"
        "Answer with the option's letter from the given choices directly."
    )
    assert (second.prompt, second.answer) == ("As it is.", "A")
    video, text = first.asked(first.video, seed=3).messages[0]["content"]
    assert video["video_url"]["url"].startswith("data:video/mp4;base64,")
    assert text["text"] == first.prompt and first.asked(first.video, seed=3).seed == 3


def test_videos_are_beside_the_file_or_in_a_folder_or_at_a_url(tmp_path: Path) -> None:
    path = written(tmp_path, asked())
    (elsewhere := tmp_path / "videos").mkdir()
    (elsewhere / "a.mp4").write_bytes(b"")
    found = [
        read_questions(path, videos)[0].video for videos in (None, str(elsewhere), "file:///d/")
    ]
    assert found == [str(tmp_path / "a.mp4"), str(elsewhere / "a.mp4"), "file:///d/a.mp4"]
    path = written(tmp_path, asked(video="https://example.com/b.mp4"))
    assert read_questions(path)[0].video == "https://example.com/b.mp4"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "expected a JSON object"),
        ("{", "expected a JSON object"),
        (asked(id=""), "`id` is missing"),
        (asked(id=True), "`id` must be a text, not true"),
        ({"id": "1", "video": "a.mp4"}, "`question` is missing"),
        (asked(answer=4), "`answer` must be a text, not 4"),
        (asked(video="b.mp4"), "there is no video .*b.mp4"),
        (asked(options="red"), "`options` must be a list of texts"),
        (asked(options=["red"] * 27), "at most 26"),
        (asked(options=COLOURS, answer="D"), "one of the options or a letter from A to C"),
        (asked(id="first"), "the id 'first' stands there twice"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str | dict[str, Any], message: str) -> None:
    path = written(tmp_path, asked(id="first"), line)
    with pytest.raises(InvalidRequestError, match=f"questions.jsonl, line 2: .*{message}"):
        read_questions(path)


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="has no questions"):
        read_questions(written(tmp_path, ""))
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
        read_questions(tmp_path / "none.jsonl")


def test_a_free_answer_is_right_if_its_words_are_equal() -> None:
    def is_right(text: str, answer: str | None) -> bool | None:
        question = VideoQuestion(id="1", video="a.mp4", prompt="?", answer=answer)
        return question.is_right(text)

    assert is_right(" it is RED,\nthen blue", "It is red, then blue.") is True
    assert is_right("It is red.", "It is red, then blue.") is False
    assert is_right("It is red.", None) is None


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
