"""Some seconds of ``python -m tests.soak`` without kills, and of ``tests.soak.attacked``."""

import pytest
from rich.console import Console

from hippo.client.requests import Question
from tests.e2e.support import Running, data_url, further_gateway, video_message
from tests.soak import attacked, promises
from tests.soak.__main__ import SAMPLINGS, Plan, expected, problems, soak
from tests.soak.visitors import Task

ATTACKS = ["silent-connections", "foreign-pages"]  # that cost little
SAMPLED = {"temperature": 0.8, "seed": 1, "max_tokens": 8}


@pytest.fixture
def found(running: Running, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What was seen in three seconds; how long answers took is not looked at."""
    for module in (attacked, promises):
        monkeypatch.setattr(module, "MAX_SLOWDOWN", 1e6)
    console, lines = Console(quiet=True), list[str]()
    addresses = {name: running.stack.address(name) for name in ("draft", "target")}
    keys = ",".join(f"{name}={key}" for name, key in attacked.KEYS.items())
    with further_gateway(running, "--api-keys", keys, lines=lines) as door:
        pids = {**running.pids(), "gateway": door.child.pid}
        place = attacked.Place(door.url, lambda: pids, addresses, lines)
        questions = (
            Question("video", [video_message(data_url(running.clip))]),
            Question("text", [{"role": "user", "content": "Who are you?"}]),
        )
        tasks = [Task(question, SAMPLED) for question in questions]
        tasks = expected(door.url, tasks, console, key=attacked.KEYS["alice"])
        phases = attacked.attacked(place, tasks, ATTACKS, 3.0, console)
    return {"limits_mb": promises.compose_limits(), "phases": phases}


def test_ordinary_clients_notice_no_attack_and_a_broken_promise_is_told(
    found: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert promises.problems(found) == []
    _, rows = promises.table(found)
    assert [row[0] for row in rows] == [promises.QUIET, *ATTACKS]
    silent, foreign = (row[-1] for row in rows[1:3])
    assert "opened" in silent and "401" in foreign
    monkeypatch.setattr(promises, "MAX_SLOWDOWN", 0.0)
    told = promises.problems({**found, "limits_mb": dict.fromkeys(promises.SERVICES, 1.0)})
    assert {each.partition(": the gateway had")[0] for each in told} >= {*ATTACKS}
    assert {each.partition(":")[0] for each in told if "a text" in each} >= {*ATTACKS}


def test_clients_of_all_kinds_leave_nothing_behind(running: Running) -> None:
    question = Question("clip", [video_message(data_url(running.clip))])
    console = Console(quiet=True)
    tasks = [Task(question, {**form, "max_tokens": 48}) for form in SAMPLINGS]
    tasks = expected(running.url, tasks, console)
    result = soak(running, tasks, Plan(minutes=0.05, clients=4, seed=1), kills=False)
    assert problems(result) == []
    assert result["outcomes"].get("reads: equal answer", 0) > 0
