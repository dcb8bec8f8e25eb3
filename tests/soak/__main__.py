"""Full load for minutes, with clients that leave and a draft that is killed and stopped.

    python -m tests.soak                                     10 minutes, 12 clients on 8 slots
    python -m tests.soak --minutes 2 --dtype bfloat16

Most clients read their answer, which must be target-only's token for token; others leave, read
slowly, or ask what must be refused. In the last 40 % of the time the draft is only stopped, so that
its memory can be watched. Exits with 1 if anything was not as docs/reliability.md, "Soak", says.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.answers.runs import bundled_pair, questions_about
from bench.base.clips import held_out_clips
from bench.base.options import add_out, new_result, parser_of, write_result
from hippo.cli.stack import Stack
from hippo.client.server import Server
from hippo.client.tables import progress_bar
from tests.soak.memory import Sample, growth_mb_a_minute, watch_memory
from tests.soak.visitors import Tally, Task, Visitor, body
from tests.support.running.stack import RunningStack, run_stack

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.95, "presence_penalty": 0.4},
    {"temperature": 0, "stop": [" early"], "min_tokens": 12},
)
MAX_GROWTH_MB = 1.0  # a minute
_NUM_CLIPS = 16  # each is asked about in four ways
_SERVICE = ("--slots", "8", "--vision-cache-mb", "16", "--media-cache-mb", "16")  # soon full
_IDLE_S = 15.0  # in which everything must be free at the end
_KILLS_SHARE = 0.6  # of the time
_BETWEEN_S = (6.0, 16.0)  # from one trouble to the next
_GONE_S = (0.5, 4.0)  # how long a killed draft stays away
_STOPPED_S = (0.5, 6.0)
_KILLED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how many clients, and what decides about chance."""

    minutes: float
    clients: int
    seed: int


def main(argv: Sequence[str] | None = None) -> None:
    """Runs, prints a table for docs/reliability.md and writes JSON."""
    args = _parse(argv)
    plan = Plan(args.minutes, args.clients, args.seed)
    console = Console()
    options = bundled_pair(args.dtype, target_args=_SERVICE, draft_args=_SERVICE)
    with tempfile.TemporaryDirectory() as folder, run_stack(options) as stack:
        clips = held_out_clips(Path(folder), kind="short", num_clips=_NUM_CLIPS)
        questions = questions_about(clips)
        tasks = [Task(question, form) for question in questions for form in SAMPLINGS]
        found = soak(stack, expected(stack.url, tasks, console), plan)
    result = new_result("tests.soak", argv, dtype=args.dtype, **asdict(plan), **found)
    write_result(args.out, result)
    for name, figure in rows(result):
        console.print(f"| {name} | {figure} |", highlight=False, soft_wrap=True)
    console.print(f"written to {args.out}")
    for problem in problems(result):
        console.print(f"[red]{problem}[/]", highlight=False)
    sys.exit(1 if problems(result) else 0)


def expected(
    url: str, tasks: Sequence[Task], console: Console, *, key: str | None = None
) -> list[Task]:
    """The tasks with target-only's answers, asked one at a time."""
    connection = Server(url, key).connect()
    done = []
    with progress_bar(console) as progress:
        for task in progress.track(tasks, description="target-only's answers"):
            answer = connection.ask(json.dumps(body(task, policy="off")).encode())
            done.append(replace(task, expected=(answer.token_ids, answer.finish_reason)))
    connection.close()
    return done


def soak(
    stack: RunningStack, tasks: Sequence[Task], plan: Plan, *, kills: bool = True
) -> dict[str, Any]:
    """Runs the clients and the trouble beside each other; returns what came of it."""
    tally, stop = Tally(), threading.Event()
    samples: dict[str, list[Sample]] = {}
    seconds = 60 * plan.minutes
    began_s = time.monotonic()
    chances = [random.Random(plan.seed + number) for number in range(plan.clients)]
    visitors = [Visitor(stack.url, tasks, tally, stop, chance) for chance in chances]
    threads = [threading.Thread(target=visitor.run) for visitor in visitors]
    threads.append(threading.Thread(target=watch_memory, args=(stack.pids, stop, samples)))
    timer = threading.Timer(seconds, stop.set)
    for thread in (*threads, timer):
        thread.start()
    try:
        # In this thread, which outlives the drafts: Linux ends a child with the thread it is of.
        kills_until_s = _KILLS_SHARE * seconds if kills else 0.0
        troubles = Counter(_trouble_draft(stack.stack, stop, plan.seed, kills_until_s))
    finally:
        timer.cancel()
        stop.set()
        for thread in threads:
            thread.join()
    growth = {
        name: growth_mb_a_minute(series, after_s=min(120.0, seconds / 5))  # its caches fill
        for name, series in samples.items()
    }
    return {
        "seconds": time.monotonic() - began_s,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "faults": tally.faults,
        "num_tokens": tally.num_tokens,
        "troubles": dict(troubles),
        "memory": {name: [asdict(each) for each in series] for name, series in samples.items()},
        "growth_mb_a_minute": growth,
        **_left_behind(stack),
    }


def _trouble_draft(
    stack: Stack, stop: threading.Event, seed: int, kills_until_s: float
) -> Iterator[str]:
    """Kills the draft and starts it again, or stops and continues it, until ``stop``; yields what
    it did. After ``kills_until_s`` it only stops and continues."""
    draft, began_s, rng = stack.child("draft"), time.monotonic(), random.Random(seed)
    while not stop.wait(rng.uniform(*_BETWEEN_S)):
        if time.monotonic() - began_s < kills_until_s and rng.random() < _KILLED_SHARE:
            draft.send_signal(signal.SIGKILL)
            draft.wait(5.0)
            stop.wait(rng.uniform(*_GONE_S))
            stack.start_service("draft")
            yield "killed"
        else:
            draft.send_signal(signal.SIGSTOP)
            try:
                stop.wait(rng.uniform(*_STOPPED_S))
            finally:
                draft.send_signal(signal.SIGCONT)
            yield "stopped"


def problems(result: dict[str, Any]) -> list[str]:
    """What was not as it must be."""
    found = [f"{count} × {what}" for what, count in Counter(result["faults"]).items()]
    found += [f"{name}: {count:g} at the end" for name, count in result["left"].items() if count]
    found += [
        f"{name} grew by {slope:.2f} MB a minute"
        for name, slope in result["growth_mb_a_minute"].items()
        if slope is not None and slope >= MAX_GROWTH_MB
    ]
    return found


def rows(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what was done and what came of it, by name."""
    outcomes = result["outcomes"]
    finished = sum(count for name, count in outcomes.items() if name.endswith("equal answer"))
    different = outcomes.get("answered differently", 0)
    yield "clients, slots", f"{result['clients']}, {_SERVICE[1]}"
    yield f"requests in {result['seconds'] / 60:.1f} minutes", f"{sum(outcomes.values()):,}"
    yield from ((name, f"{count:,}") for name, count in outcomes.items())
    yield "finished answers equal to target-only's", f"{finished:,} of {finished + different:,}"
    yield "tokens of them", f"{result['num_tokens']:,}"
    yield from ((f"draft {kind}", f"{count}") for kind, count in result["troubles"].items())
    yield "what should not have been", f"{len(result['faults'])}"
    yield from ((f"{name}, at the end", f"{count:g}") for name, count in result["left"].items())
    yield "all free after the last client", f"{result['idle_after_s']:.2f} s"
    for name, slope in result["growth_mb_a_minute"].items():
        last = f"{result['memory'][name][-1]['resident_mb']:,.0f} MB at the end"
        grew = "life too short" if slope is None else f"{slope:+.2f} MB a minute"
        yield f"memory of the {name}", f"{grew}, {last}"


def _left_behind(stack: RunningStack) -> dict[str, Any]:
    """Slots in use once it is quiet, or after a while; and how long that took."""
    began_s = time.monotonic()
    stack.stack.wait_ready()  # a draft that was just started again
    while True:
        left = {
            f"slots of the {name}": stack.metric(name, "hippo_slots_used")
            for name in ("target", "draft")
        }
        took_s = time.monotonic() - began_s
        if not any(left.values()) or took_s > _IDLE_S:
            return {"left": left, "idle_after_s": took_s}
        time.sleep(0.02)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("tests.soak", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0)
    add("--clients", type=int, default=12)
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")

    add("--seed", type=int, default=0, help="of what clients do and of the trouble")
    add_out(parser, "soak.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
