"""Three ordinary clients beside an attacker with a key of its own, one attack after the other.

    python -m tests.soak.attacked                    10 minutes
    python -m tests.soak.attacked --list             what the attacks do
    python -m tests.soak.attacked --minutes 2 --only gif,grammars
    python -m tests.soak.attacked --publish          writes the table into docs/reliability.md too

What must hold for the clients: docs/reliability.md, "Attacks". Each has a key and asks one question
after the other about a video or a text, on a new connection and without help of a cache. Exits with
1, and says what was not so.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from bench.answers.runs import bundled_pair
from bench.base.clips import held_out_clips
from bench.base.options import add_out, names, new_result, parser_of, write_result
from bench.base.tables import wide_console, wide_table
from bench.pages.markers import rewrite
from bench.pages.results import environment_line
from hippo.base.subprocesses import importing_environment
from hippo.client.requests import Question, new_salt, question_about
from hippo.client.server import Server
from hippo.client.tables import markdown
from hippo.errors import HippoError
from tests.soak.__main__ import expected
from tests.soak.attacker import Aim
from tests.soak.attacks import ATTACKS
from tests.soak.memory import reset_peaks, tree_mb
from tests.soak.promises import (
    MAX_RECOVERY_S,
    MAX_SLOWDOWN,
    QUIET,
    SERVICES,
    compose_limits,
    problems,
    table,
    worst,
)
from tests.soak.visitors import Task, body
from tests.support.running.stack import RunningStack, run_stack
from tests.support.watching.compose import ROOT

CLIENTS, MALLORY = ("alice", "bob", "carol"), "mallory"
KEYS = {name: f"sk-{name}-0123456789" for name in (*CLIENTS, MALLORY)}
_SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 1})
_NUM_TOKENS = 32  # in each answer: answers of one kind take equally long
_TEXTS = ("What is a circle?", "Name three colours.", "What moves to the left?", "Who are you?")
_TIMEOUT_S = 60.0  # a read of an ordinary client's
_PAUSE_S = 0.2  # after a client's question failed
_EVERY_S = 2.0  # between two looks at the memory, which take some milliseconds
_FIRST_SHARE, _QUIET_SHARE = 0.05, 0.25  # of the first quiet phase, of others
_LEAST_QUIET = 2 * len(_SAMPLINGS)  # questions of a client in a quiet phase: of each kind
_ALL_CORES = os.sched_getaffinity(0)  # before this process is pinned to the draft's
_GATEWAY = (
    *("--api-keys", ",".join(f"{name}={key}" for name, key in KEYS.items())),
    # Who gives keys to strangers limits them: what an attacker may compute is a client's fair use.
    *("--key-concurrent-requests", "2"),
    *("--max-upload-bytes", str(1 << 30)),  # so that the attacker reaches it
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of one question: of which kind it was, seconds to its end, what was wrong."""

    kind: str
    seconds: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """What is attacked, by whom and beside whom."""

    url: str
    pids: Callable[[], Mapping[str, int]]
    addresses: Mapping[str, str]  # for draft and target
    lines: Sequence[str]  # what the services log
    ended: Callable[[], list[str]] = list  # the services that have ended

    def server(self, name: str) -> Server:
        """The gateway, for a client of that name."""
        return Server(self.url, KEYS[name], timeout_s=_TIMEOUT_S)

    def aim(self, attack: str) -> Aim:
        """What the attacker is told."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return Aim(
            attack, parts.hostname, parts.port, KEYS[MALLORY], KEYS[CLIENTS[0]], self.addresses
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs, prints a table, and writes JSON and with --publish the page."""
    args = _parse(argv)
    console = wide_console()
    if args.list:
        for name, attack in ATTACKS.items():
            console.print(f"{name:20} {attack.__doc__}", highlight=False)
        return
    result = new_result("tests.soak.attacked", argv, limits_mb=compose_limits())
    options = bundled_pair("float32", gateway_args=_GATEWAY)
    with tempfile.TemporaryDirectory() as folder, run_stack(options) as stack:
        addresses = {name: stack.stack.address(name) for name in ("draft", "target")}
        ended = functools.partial(_ended, stack)
        place = Place(stack.url, stack.pids, addresses, stack.lines, ended)
        tasks = expected(stack.url, _tasks(Path(folder)), console, key=KEYS[CLIENTS[0]])
        result["phases"] = attacked(place, tasks, args.only, 60 * args.minutes, console)
    write_result(args.out, result)
    columns, rows = table(result)
    console.print(wide_table("beside three clients", columns, rows))
    console.print(f"written to {args.out}")
    if args.publish:
        head = f"`{result['command']}`, {environment_line(result['environment'])}"
        kept = len(columns) - 3  # what the attacker got is in the JSON
        page = f"{head}\n\n{markdown(columns[:kept], [row[:kept] for row in rows])}"
        rewrite(ROOT / "docs/reliability.md", "attacker", page)
    for problem in problems(result):
        console.print(problem, style="red", highlight=False, markup=False)
    sys.exit(1 if problems(result) else 0)


def attacked(
    place: Place, tasks: Sequence[Task], attacks: Sequence[str], seconds: float, console: Console
) -> list[dict[str, Any]]:
    """Runs all phases, about so many seconds; returns what was seen in each."""
    for task in tasks:  # what only first requests have to warm up is no slowness of an attack
        ask(place.server(CLIENTS[0]), task)
    first_s, each_s = _FIRST_SHARE * seconds, (1 - _FIRST_SHARE) * seconds / max(len(attacks), 1)
    phases: list[dict[str, Any]] = []
    plan = [(QUIET, first_s)]
    for name in attacks:
        plan += [(name, (1 - _QUIET_SHARE) * each_s), (QUIET, _QUIET_SHARE * each_s)]
    quiet_s: dict[str, float] = {}
    for name, phase_s in plan:
        console.print(f"{name} for {phase_s:.0f} s")
        least = 0 if name != QUIET else len(tasks) if not phases else _LEAST_QUIET
        phases.append(_phase(place, tasks, name, phase_s, least))
        if phases[0]["faults"] or phases[-1]["ended"]:  # then nothing can be compared
            break
        if name == QUIET:
            quiet_s = worst(phases[-1])
        else:
            phases[-1]["recovered_s"] = _recover(place, tasks, quiet_s)
    return phases


def ask(server: Server, task: Task) -> Seen:
    """Asks it on a connection of its own, without help of what is cached."""
    asked = json.dumps(body(task, policy="adaptive", salt=new_salt())).encode()
    connection, began_s = server.connect(), time.perf_counter()
    try:
        answer = connection.ask(asked)
    except HippoError as error:
        return Seen(task.question.name, time.perf_counter() - began_s, f"failed: {error}")
    finally:
        connection.close()
    is_equal = (answer.token_ids, answer.finish_reason) == task.expected
    fault = "" if is_equal else "an answer is not target-only's"
    return Seen(task.question.name, answer.end_to_end_s, fault)


def _phase(
    place: Place, tasks: Sequence[Task], name: str, seconds: float, least: int
) -> dict[str, Any]:
    """Lets the clients ask for so long, each ``least`` questions or more, beside the attack if it
    is one."""
    stop, is_over, first_line = threading.Event(), threading.Event(), len(place.lines)
    with contextlib.ExitStack() as stack:
        attacker = stack.enter_context(_attacking(place.aim(name))) if name in ATTACKS else None
        pool = stack.enter_context(ThreadPoolExecutor())
        watching = pool.submit(_watch, place, is_over)
        asking = [
            # They do not all ask the same at once.
            pool.submit(_keep_asking, place.server(client), [*tasks[n:], *tasks[:n]], stop, least)
            for n, client in enumerate(CLIENTS)
        ]
        for event in (is_over, stop):
            stack.callback(event.set)
        stop.wait(seconds)
        stop.set()
        seen = [each for one in asking for each in one.result()]
    answered: dict[str, list[float]] = {}
    for each in seen:
        if not each.fault:
            answered.setdefault(each.kind, []).append(each.seconds)
    return {
        "name": name,
        "num_answers": len(seen),
        "seconds": answered,
        "faults": [each.fault for each in seen if each.fault],
        "resident_mb": watching.result(),
        "num_tracebacks": sum("Traceback" in line for line in place.lines[first_line:]),
        "ended": place.ended(),
        "attacker": attacker,
        "recovered_s": None,
    }


def _keep_asking(
    server: Server, tasks: Sequence[Task], stop: threading.Event, least: int
) -> list[Seen]:
    """Asks one after the other until ``stop``, and at least so many."""
    seen: list[Seen] = []
    for task in itertools.cycle(tasks):
        if stop.is_set() and len(seen) >= least:
            break
        seen.append(ask(server, task))
        if seen[-1].fault:
            stop.wait(_PAUSE_S)
    return seen


def _watch(place: Place, is_over: threading.Event) -> dict[str, float]:
    """The most resident memory of each service."""
    peaks = dict.fromkeys(SERVICES, 0.0)
    for pid in place.pids().values():
        reset_peaks(pid)
    is_last = False
    while not is_last:
        is_last = is_over.wait(_EVERY_S)
        for name, pid in place.pids().items():
            peaks[name] = max(peaks[name], tree_mb(pid, "VmHWM"))
    return peaks


@contextlib.contextmanager
def _attacking(aim: Aim) -> Iterator[dict[str, Any]]:
    """The attacker is at work; what it got is in the dictionary afterwards."""
    command = [sys.executable, "-m", "tests.soak.attacks", json.dumps(asdict(aim))]
    got: dict[str, Any] = {}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=importing_environment(), **pipes) as process:
        assert process.stdout is not None
        os.sched_setaffinity(process.pid, _ALL_CORES)
        process.stdout.readline()  # its payloads are made
        try:
            yield got
        finally:
            out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the attacker {aim.attack} failed")
    got.update(json.loads(out))


def _recover(place: Place, tasks: Sequence[Task], quiet_s: Mapping[str, float]) -> float | None:
    """Returns the seconds until a question of each kind is answered as fast as before; None if it
    is not in a minute."""
    began_s = time.monotonic()
    one_of_each = {task.question.name: task for task in tasks}.values()
    while (passed_s := time.monotonic() - began_s) < MAX_RECOVERY_S:
        seen = [ask(place.server(CLIENTS[0]), task) for task in one_of_each]
        if all(
            not each.fault and each.seconds <= MAX_SLOWDOWN * quiet_s[each.kind] for each in seen
        ):
            return passed_s
        time.sleep(_PAUSE_S)
    return None


def _tasks(folder: Path) -> list[Task]:
    """Questions about clips, which are written to the folder, and about nothing, in turn."""
    clips = held_out_clips(folder, kind="short", num_clips=len(_TEXTS))
    questions: list[Question] = []
    for clip, text in zip(clips, _TEXTS, strict=True):
        questions += [
            question_about(clip.question, str(clip.path), name="video"),
            question_about(text, name="text"),
        ]
    budget = {"max_tokens": _NUM_TOKENS, "ignore_eos": True}
    return [Task(each, {**form, **budget}) for each in questions for form in _SAMPLINGS]


def _ended(stack: RunningStack) -> list[str]:
    return [name for name in SERVICES if not stack.stack.child(name).is_running]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("tests.soak.attacked", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="of which more than a quarter is quiet")
    add("--only", type=names, default=list(ATTACKS), help="attacks, separated by commas")
    add("--list", action="store_true", help="show what the attacks do")
    add("--publish", action="store_true", help="write the table into docs/reliability.md")
    add_out(parser, "attacked.json")
    args = parser.parse_args(argv)
    if unknown := set(args.only) - set(ATTACKS):
        parser.error(f"--only: there is no attack {', '.join(sorted(unknown))}")
    return args


if __name__ == "__main__":
    main()
