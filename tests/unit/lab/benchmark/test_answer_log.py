"""A stopped measurement goes on with the answers that are there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hippo.client.answers import Answer
from hippo.errors import InvalidRequestError
from hippo.lab.benchmark.answer_log import AnswerLog
from hippo.lab.benchmark.video_questions import VideoQuestion

SETTINGS = {"model": "hippo", "max_tokens": 8}
ANSWER = Answer(
    text="Grün.", asked_s=2.0, piece_s=(2.5, 3.25), token_ids=(4, 5), finish_reason="stop",
    usage={"completion_tokens": 2}, figures={"timings_ms": {"decode": 750.0}},
)  # fmt: skip


def question(name: str, prompt: str = "What?") -> VideoQuestion:
    return VideoQuestion(id=name, video="a.mp4", prompt=prompt)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the answers to the questions 1 and 2."""
    found = tmp_path / "a.jsonl"
    log = AnswerLog(found, SETTINGS)
    for name in "12":
        log.add(question(name), "adaptive", ANSWER)
    return found


def test_an_answer_comes_back_with_its_times_and_figures(path: Path) -> None:
    log = AnswerLog(path, SETTINGS)
    assert log.has(question("1"), "adaptive") and not log.has(question("1"), "off")
    found = log.answers["1", "adaptive"]
    assert (found.text, found.token_ids, found.figures) == ("Grün.", (4, 5), ANSWER.figures)
    assert (found.ttft_s, found.end_to_end_s, found.decode_s) == (0.5, 1.25, 0.75)


@pytest.mark.parametrize("rest", ["", '{"id": "3", "sys', '{"id": "3"}\n', "\0\0\0\n", "null"])
def test_a_line_cut_off_at_the_end_is_removed(path: Path, rest: str) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + rest.encode())
    log = AnswerLog(path, SETTINGS)
    assert sorted(log.answers) == [("1", "adaptive"), ("2", "adaptive")]
    log.add(question("3"), "adaptive", ANSWER)
    assert path.read_bytes().startswith(whole)
    assert len(path.read_bytes().splitlines()) == 4


def test_a_file_that_cannot_be_repaired_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, length: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    path.write_bytes(path.read_bytes() + b"{")
    monkeypatch.setattr(os, "truncate", refuse)
    with pytest.raises(InvalidRequestError, match="cannot be written: Permission denied"):
        AnswerLog(path, SETTINGS)


def test_a_line_of_which_only_the_end_is_missing_stays(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    log = AnswerLog(path, SETTINGS)
    assert len(log.answers) == 2
    assert path.read_bytes() == whole


def test_what_is_no_file_of_these_answers_is_refused_and_stays(path: Path, tmp_path: Path) -> None:
    lines = path.read_text().splitlines()
    other = tmp_path / "questions.jsonl"
    for text, message in (
        ("\n".join([lines[0], "{", *lines[1:]]), "line 2: this is no answer"),
        ('{"id": "1", "video": "a.mp4"}', "is no file of answers"),
        ("notes", "is no file of answers"),
    ):
        other.write_text(text)
        with pytest.raises(InvalidRequestError, match=message):
            AnswerLog(other, SETTINGS)
        assert other.read_text() == text
    with pytest.raises(InvalidRequestError, match="measured with max_tokens 8"):
        AnswerLog(path, {**SETTINGS, "max_tokens": 9})
    with pytest.raises(InvalidRequestError, match="cannot be read: Is a directory"):
        AnswerLog(tmp_path, SETTINGS)
    log = AnswerLog(path, SETTINGS)
    with pytest.raises(InvalidRequestError, match="another question with the id '1'"):
        log.has(question("1", prompt="Who?"), "adaptive")
