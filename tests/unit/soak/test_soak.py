"""What a soak counts as growth, and as a problem."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest

from hippo.client.requests import Question
from tests.soak import visitors
from tests.soak.__main__ import problems, rows
from tests.soak.memory import Sample, growth_mb_a_minute, tree_mb
from tests.soak.visitors import Tally, Task, Visitor
from tests.support.running.plain_server import PlainServer, serving


def test_growth_is_that_of_the_last_process_after_its_warm_up() -> None:
    first = [Sample(5.0 * n, 1, 500.0 - n) for n in range(20)]
    warming = [Sample(100 + 5.0 * n, 2, 100.0 + 10 * n) for n in range(12)]
    warm = [Sample(160 + 5.0 * n, 2, 220.0 + 0.25 * n) for n in range(24)]
    growth = growth_mb_a_minute([*first, *warming, *warm], after_s=60)
    assert growth == pytest.approx(3.0)  # 0.25 MB every 5 s


def test_a_process_that_has_ended_but_was_not_waited_for_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and not process.stdout.read()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert tree_mb(process.pid, "VmHWM") == 0.0


def test_who_is_told_to_come_later_is_one_outcome_whatever_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visitors, "FATES", {"reads": 1, "asks nonsense": 1})
    tally, stop = Tally(), threading.Event()
    with serving(PlainServer(failing=range(10**6), failing_status=429)) as full:
        task = Task(Question("clip", ({"role": "user", "content": "Who?"},)), {})
        thread = threading.Thread(target=Visitor(full.url, [task], tally, stop, 0).run)
        thread.start()
        while tally.outcomes.total() < 6:  # both kinds with this seed
            time.sleep(0.01)
        stop.set()
        thread.join()
    assert set(tally.outcomes) == {"told to come later (429)"} and not tally.faults


def _result(**changes: Any) -> dict[str, Any]:
    result = {
        "seconds": 600.0,
        "num_clients": 12,
        "slots": 8,
        "outcomes": {"reads: equal answer": 70, "reads slowly: equal answer": 5, "leaves early": 9},
        "faults": [],
        "num_tokens": 9000,
        "troubles": [{"kind": "killed", "at_s": 3.0, "seconds": 8.0}],
        "memory": {"target": [{"at_s": 5.0, "pid": 1, "resident_mb": 800.0}]},
        "growth_mb_a_minute": {"target": 0.2},
        "left": {"slots of the target": 0.0},
        "idle_after_s": 0.3,
    }
    return {**result, **changes}


def test_the_table_has_the_finished_answers_of_all_kinds() -> None:
    shown = dict(rows(_result()))
    assert shown["finished answers equal to target-only's"] == "75 of 75"
    assert shown["requests"] == "84"
    assert shown["draft killed and started again"] == "1"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"faults": ["failed: lost", "failed: lost"]}, "2 × failed: lost"),
        ({"left": {"slots of the draft": 2.0}}, "slots of the draft: 2 at the end"),
        ({"growth_mb_a_minute": {"draft": 1.5}}, "draft grew by 1.50 MB a minute"),
    ],
)
def test_each_thing_that_must_not_be_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    assert problems(_result()) == []
    assert problems(_result(**changes)) == [problem]
