"""Stacks of the bundled pair, and runs of systems on clips, interleaved; runs are plain data."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console

from bench.answers.systems import System
from bench.base.cells import LATENCY_COLUMNS, cells
from bench.base.clips import ClipFile
from bench.base.environment import ROOT
from bench.base.tables import wide_table
from hippo.cli.stack import BUNDLED_PAIR, Stack, StackOptions, default_cores
from hippo.client.figures import summarise
from hippo.client.latency import Record, measure, num_answers
from hippo.client.requests import Question, RequestForm, question_about
from hippo.client.server import Server
from hippo.client.tables import watched

STACK_LOG = ROOT / "bench/out/stack.log"
FORM = RequestForm(model="hippo", is_hippo=True)
"""The form of requests to a gateway. A request reuses nothing that the server has cached."""


def bundled_pair(dtype: str, **changes: Any) -> StackOptions:
    """Returns options for the bundled pair, with ``changes``, and if both models are on a CPU pins
    this process to the draft's core; the target has the other core. Raises SystemExit in a process
    that is pinned already, because both models would share its core."""
    if len(os.sched_getaffinity(0)) == 1 and (os.cpu_count() or 1) > 1:
        raise SystemExit("bundled_pair: this process has one core only; two are needed")
    target_core, draft_core = default_cores(
        changes.get("target_device", "cpu"), changes.get("draft_device", "cpu")
    )
    if draft_core is not None:
        os.sched_setaffinity(0, {draft_core})
    options = StackOptions(
        target_model=str(BUNDLED_PAIR / "target"),
        draft_model=str(BUNDLED_PAIR / "draft"),
        dtype=dtype,
        target_core=target_core,
        draft_core=draft_core,
        prefill_helper_layers="0" if draft_core is None else "auto",  # as `hippo up`
        port=0,
    )
    return replace(options, **changes)


@contextmanager
def running_stack(
    options: StackOptions, *, on_start: Callable[[Stack], None] = lambda stack: None
) -> Iterator[Stack]:
    """Starts a stack; yields it when it is ready. Its log goes to bench/out/stack.log.

    Calls ``on_start`` when the processes run, before they have loaded their models.
    """
    STACK_LOG.parent.mkdir(parents=True, exist_ok=True)
    with (
        STACK_LOG.open("a", encoding="utf-8") as log,
        Stack(options, lambda name, line: print(f"{name}: {line}\n", end="", file=log)) as stack,
    ):
        stack.start()
        on_start(stack)
        stack.wait_ready()
        yield stack


def pids_of(stack: Stack) -> dict[str, int]:
    """Returns the process ids of services and gateway."""
    return {name: stack.child(name).pid for name in ("gateway", "draft", "target")}


def questions_about(clips: Sequence[ClipFile]) -> list[Question]:
    """Returns each clip's question, with the index as its seed."""
    return [_question(clip, seed) for seed, clip in enumerate(clips)]


def _question(clip: ClipFile, seed: int) -> Question:
    asked = question_about(clip.question, str(clip.path), name=clip.path.name, seed=seed)
    if clip.is_video_first:
        return asked
    (message,) = asked.messages
    return replace(asked, messages=[{**message, "content": message["content"][::-1]}])


def ask_systems(
    console: Console,
    url: str,
    clips: Sequence[ClipFile],
    systems: Sequence[System],
    *,
    title: str,
    temperature: float = 0.0,
    num_repeats: int = 1,
    has_timeline: bool = False,
) -> list[Record]:
    """Returns the records of ``latency.measure``, and shows a progress bar meanwhile.

    ``has_timeline`` keeps every verdict and block in an answer's figures.
    """
    form = replace(FORM, temperature=temperature, further={"return_timeline": has_timeline})
    measured = measure(Server(url), form, questions_about(clips), systems, num_repeats=num_repeats)
    return watched(measured, console, title=title, total=num_answers(systems, len(clips)))


def run_systems(
    console: Console,
    url: str,
    clips: Sequence[ClipFile],
    systems: Sequence[System],
    *,
    title: str,
    temperature: float = 0.0,
    num_repeats: int = 1,
) -> tuple[list[Record], dict[str, Any]]:
    """Measures the systems and prints their table; returns the records, and both as data."""
    records = ask_systems(
        console, url, clips, systems, title=title, temperature=temperature,
        num_repeats=num_repeats,
    )  # fmt: skip
    rows = summarise(records)
    title = f"{title}, {len(clips)} clips"
    console.print(wide_table(title, LATENCY_COLUMNS, cells(LATENCY_COLUMNS, rows)))
    return records, {
        "temperature": temperature,
        "summary": rows,
        "records": [record.as_dict() for record in records],
    }
