"""The closed loop against real HTTP servers; a stopped measurement goes on with its answers."""

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hippo.client.answers import Answer
from hippo.client.requests import Question, Request, RequestForm
from hippo.client.server import Server
from hippo.errors import InvalidRequestError, UnavailableError
from hippo.lab.benchmark.answer_log import AnswerLog
from hippo.lab.benchmark.load import ClosedLoop
from hippo.lab.benchmark.video_questions import VideoQuestion
from tests.support.running.plain_server import PlainServer, serving


def requests(count: int) -> list[Request]:
    form = RequestForm(model="plain")
    return [
        form.request(Question(str(number), [{"role": "user", "content": str(number)}]))
        for number in range(count)
    ]


def loop(plain: PlainServer, **wishes: Any) -> ClosedLoop:
    return ClosedLoop([Server(plain.url)], requests(1), **wishes)


def test_all_questions_are_asked_in_turn_until_enough_answers_have_ended() -> None:
    started, answered = [], []
    # They take their time, so that no client is done before the other one begins.
    slow = [PlainServer(pause_s=0.02) for _ in range(2)]
    with serving(slow[0]) as one, serving(slow[1]) as other:
        run = ClosedLoop(
            [Server(one.url), Server(other.url)],
            requests(3),
            num_clients=2,
            num_answers=7,
            on_start=lambda: started.append(1),
            on_answer=lambda: answered.append(1),
        ).run()
    assert len(run.answers) == len(answered) == 9
    assert len(run.counted) == 7
    assert len(started) == 1
    assert {index for index, _ in run.answers} == {0, 1, 2}
    assert all(answer.ended_s >= answer.asked_s for _, answer in run.answers)
    assert one.bodies and other.bodies
    assert max(one.most_open, other.most_open) == 1
    asked = Counter(str(body["messages"][0]["content"]) for body in one.bodies + other.bodies)
    assert set(asked) == {"0", "1", "2"}
    assert max(asked.values()) - min(asked.values()) <= 1


def test_a_loop_of_some_seconds_keeps_all_clients_busy_and_ends_with_an_answer_after_them() -> None:
    with serving(PlainServer(pause_s=0.02)) as plain:
        run = loop(plain, num_clients=4, seconds=0.2).run()
    assert plain.most_open == 4
    assert run.seconds >= 0.2
    assert len(run.counted) >= 1


@pytest.mark.parametrize("tolerates_errors", [False, True])
def test_a_server_that_answers_nobody_ends_the_run_with_its_words(tolerates_errors: bool) -> None:
    with (
        serving(PlainServer(failing=range(100))) as plain,
        pytest.raises(UnavailableError, match="503: all slots are taken"),
    ):
        loop(plain, num_clients=2, seconds=60, tolerates_errors=tolerates_errors).run()


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
