"""Single runs of the benchmark, of hippo's systems and of the rivals; each returns plain data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.answers.measure import Record, measure
from bench.answers.systems import System
from bench.base.cells import LATENCY_COLUMNS, latency_rows
from bench.base.clips import ClipFile
from bench.base.environment import ROOT
from bench.base.tables import wide_table
from hippo.cli.stack import BUNDLED_PAIR, Stack, StackOptions, default_cores
from hippo.client.figures import summarise
from hippo.client.latency import num_answers
from hippo.client.tables import watched

STACK_LOG = ROOT / "bench/out/stack.log"


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


def run_systems(
    console: Console,
    url: str,
    clips: Sequence[ClipFile],
    systems: Sequence[System],
    *,
    title: str,
    temperature: float = 0.0,
    num_repeats: int = 1,
    has_timeline: bool = False,
) -> tuple[list[Record], dict[str, Any]]:
    """Measures the systems with a progress bar and prints their table; returns both as data."""
    measured = measure(
        url, clips, systems, temperature=temperature, num_repeats=num_repeats,
        has_timeline=has_timeline,
    )  # fmt: skip
    total = num_answers(systems, len(clips))
    records = watched(measured, console, title=title, total=total)
    rows = summarise(records)
    title = f"{title}, {len(clips)} clips"
    console.print(wide_table(title, LATENCY_COLUMNS, latency_rows(rows)))
    return records, {
        "temperature": temperature,
        "summary": rows,
        "records": [record.as_dict() for record in records],
    }


def run_transformers(
    clips_folder: Path, *, core: int | None, dtype: str, num_clips: int
) -> list[dict[str, Any]]:
    """Times transformers' generate() on one core, alone and with an assistant model."""
    goal = clips_folder / "rivals.json"
    command = [
        *(sys.executable, "-m", "bench.answers.rivals", "--clips", str(clips_folder)),
        *("--cores", str(core or 0), "--dtype", dtype),
        *("--num-clips", str(num_clips), "--out", str(goal)),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    records: list[dict[str, Any]] = json.loads(goal.read_text(encoding="utf-8"))
    return records
