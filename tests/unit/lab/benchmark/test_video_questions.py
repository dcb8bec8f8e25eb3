"""Files of questions, and right answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hippo.errors import InvalidRequestError
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
