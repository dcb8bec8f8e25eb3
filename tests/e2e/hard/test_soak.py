"""Some seconds of ``python -m tests.soak`` on the stack of all tests, without kills."""

from __future__ import annotations

from rich.console import Console

from hippo.client.requests import Question
from tests.e2e.support import Running, data_url, video_message
from tests.soak.__main__ import SAMPLINGS, Plan, expected, problems, soak
from tests.soak.visitors import Task


def test_clients_of_all_kinds_leave_nothing_behind(running: Running) -> None:
    question = Question("clip", [video_message(data_url(running.clip))])
    console = Console(quiet=True)
    tasks = expected(running.url, [Task(question, form) for form in SAMPLINGS], console)
    result = soak(running, tasks, Plan(minutes=0.05, clients=4, seed=1), kills=False)
    assert problems(result) == []
    assert result["outcomes"].get("reads: equal answer", 0) > 0
