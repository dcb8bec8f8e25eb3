"""What stops the questions of a file, and what does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hippo.cli import main
from hippo.errors import InvalidRequestError
from hippo.lab.benchmark.answer_log import AnswerLog
from tests.support.running.plain_server import PlainServer, serving


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Options for a file with one question."""
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"id": "1", "video": "https://e.com/a.mp4", "question": "What?"}))
    return ["bench", "--questions", str(path), "--answers", str(tmp_path / "a.jsonl"), "--url"]


def test_a_full_disk_is_no_fault_of_the_question(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(*_: object) -> None:
        raise InvalidRequestError("a.jsonl cannot be written: No space left on device")

    monkeypatch.setattr(AnswerLog, "add", add)
    with serving(PlainServer()) as plain:
        assert main([*given, plain.url]) == 1
    assert "error: a.jsonl cannot be written" in capsys.readouterr().err


def test_refused_questions_are_named_and_no_answer_is_an_error(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(PlainServer(failing=(1, 2), failing_status=400)) as plain:
        assert main([*given, plain.url]) == 1
    words = " ".join(capsys.readouterr().err.split())
    assert "no question was answered: the server answered 400" in words


def test_an_overloaded_server_stops_the_run(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(PlainServer(failing=(2,), failing_status=429)) as plain:
        assert main([*given, plain.url]) == 1
        assert "the server answered 429" in capsys.readouterr().err
        assert main([*given, plain.url]) == 0
