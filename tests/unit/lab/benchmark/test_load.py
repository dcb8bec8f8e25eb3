"""The closed loop against real HTTP servers on ports of their own."""

from __future__ import annotations

from collections import Counter

import pytest

from hippo.client.requests import Question, Request, RequestForm
from hippo.client.server import Server
from hippo.errors import UnavailableError
from hippo.lab.benchmark.load import ClosedLoop
from tests.support.running.plain_server import PlainServer, serving


def requests(count: int) -> list[Request]:
    form = RequestForm(model="plain")
    return [
        form.request(Question(str(number), [{"role": "user", "content": str(number)}]))
        for number in range(count)
    ]


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
        run = ClosedLoop([Server(plain.url)], requests(1), num_clients=4, seconds=0.2).run()
    assert plain.most_open == 4
    assert run.seconds >= 0.2
    assert len(run.counted) >= 1


@pytest.mark.parametrize("tolerates_errors", [False, True])
def test_a_server_that_answers_nobody_ends_the_run_with_its_words(tolerates_errors: bool) -> None:
    with (
        serving(PlainServer(failing=range(100))) as plain,
        pytest.raises(UnavailableError, match="503: all slots are taken"),
    ):
        ClosedLoop(
            [Server(plain.url)],
            requests(1),
            num_clients=2,
            seconds=60,
            tolerates_errors=tolerates_errors,
        ).run()


def test_tolerated_errors_are_counted_beside_the_answers() -> None:
    with serving(PlainServer(failing=(2, 4))) as plain:
        run = ClosedLoop(
            [Server(plain.url)],
            requests(1),
            num_clients=1,
            num_answers=6,
            tolerates_errors=True,
        ).run()
    assert len(run.counted) == 4
    assert run.errors == ["the server answered 503: all slots are taken"] * 2
