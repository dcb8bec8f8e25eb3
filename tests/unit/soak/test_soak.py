"""What a soak counts as growth and as a problem, and a broken promise beside an attacker."""

import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from tests.soak.__main__ import problems
from tests.soak.memory import Sample, growth_mb_a_minute, tree_mb
from tests.soak.promises import QUIET, SERVICES
from tests.soak.promises import problems as broken_promises


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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"faults": ["failed: lost", "failed: lost"]}, "2 × failed: lost"),
        ({"left": {"slots of the draft": 2.0}}, "slots of the draft: 2 at the end"),
        ({"growth_mb_a_minute": {"draft": 1.5}}, "draft grew by 1.50 MB a minute"),
    ],
)
def test_each_thing_that_must_not_be_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    fine = {
        "faults": [],
        "left": {"slots of the target": 0.0},
        "growth_mb_a_minute": {"target": 0.2, "draft": None},
    }
    assert problems(fine) == []
    assert problems(fine | changes) == [problem]


def _phase(name: str, **changes: Any) -> dict[str, Any]:
    phase = {
        "name": name, "seconds": {"video": [1.0, 2.0], "text": [0.5]}, "faults": [], "ended": [],
        "resident_mb": dict.fromkeys(SERVICES, 900.0), "num_tracebacks": 0, "attacker": None,
        "recovered_s": 0.4,
    }  # fmt: skip
    return {**phase, **changes}


def _beside_an_attack(**changes: Any) -> dict[str, Any]:
    got = {"outcomes": {"400": 7}, "broken": []}
    phases = [_phase(QUIET), _phase("gif", **{"attacker": got, **changes}), _phase(QUIET)]
    return {"limits_mb": dict.fromkeys(SERVICES, 4000.0), "phases": phases}


SLOW = {"video": [4.2], "text": [0.9]}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"seconds": SLOW}, "4.20 s for a question about a video, 2.1 times the quiet worst"),
        ({"seconds": {"video": [1.0]}}, "no question about a text was answered"),
        ({"faults": ["failed: full", "failed: full"]}, "2 × failed: full"),
        ({"resident_mb": {"draft": 4100.0}}, "the draft had 4,100 MB; its limit is 4,000 MB"),
        ({"ended": ["target"]}, "the target ended"),
        ({"num_tracebacks": 1}, "1 × a traceback in the services' logs"),
        ({"recovered_s": None}, "not as fast as before within 60 s"),
        (
            {"attacker": {"outcomes": {"500": 2}, "broken": ["it tells"]}},
            "it tells\n2 × status 500, a fault of the server",
        ),
    ],
)
def test_each_broken_promise_beside_an_attacker_is_told(
    changes: dict[str, Any], found: str
) -> None:
    assert broken_promises(_beside_an_attack()) == []
    told = broken_promises(_beside_an_attack(**changes))
    assert told == [f"gif: {line}" for line in found.splitlines()]


def test_an_attack_is_compared_with_the_quiet_time_on_both_sides_of_it() -> None:
    for place in (0, 2):
        result = _beside_an_attack(seconds=SLOW)
        result["phases"][place]["seconds"] = {"video": [2.2], "text": [0.5]}
        assert broken_promises(result) == []
