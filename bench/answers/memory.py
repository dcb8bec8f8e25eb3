"""Asks about many different clips and watches the memory of each process.

    python -m bench.answers.memory                               500 clips, one a time, then eight
    python -m bench.answers.memory --num-clips 80 --warm-up 20   a short trial

All clips differ in every frame, so that no cache knows one, and the caches of media and features
are small, so that they are full after the first clips. The bundled pair answers about each clip.
The growth of a process is its median memory over the last 25 clips, compared with that over the
first 25 after the warm-up. Exits with 1 if a process grew by 5 % or more. Memory is the resident
memory without pages of files, which the kernel drops when memory is short.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from bench.answers.client import converse, user_turn
from bench.answers.runs import bundled_pair, running_stack
from bench.base.clips import filmed_clip
from bench.base.environment import ROOT
from bench.base.options import integers, parser_of
from bench.base.report import Report
from bench.base.tables import wide_console
from hippo.cli.stack import Stack
from hippo.client.tables import progress_bar

MAX_GROWTH = 0.05
WITHOUT_FILES = ("RssAnon", "RssShmem")
LARGEST_RESIDENT = ("VmHWM",)
_SLOTS = 8
_SIZES = ((640, 360), (360, 640), (480, 360), (854, 480))  # width and height, in turn
_FRAMES, _FPS = 12, 4
_WINDOW = 25  # answers
_PIXELS_SEEN = 28 * 28 * 24  # of a resized frame
_COLUMNS = ("process", "after the warm-up, MB", "at the end, MB", "growth", "largest, MB")


def main(argv: Sequence[str] | None = None) -> int:
    """Asks and writes a report with a table for each number of clients; returns the exit code."""
    args = _parse(argv)
    caches = ["--vision-cache-mb", "2", "--media-cache-mb", "8", "--slots", str(_SLOTS)]
    caches += ["--max-context-length", "4096"]
    options = bundled_pair("float32", target_args=caches, draft_args=caches)
    console, numbers = wide_console(), iter(range(len(args.clients) * args.num_clips))
    section = Report(args.out, "memory", console=console).begin_section("memory")
    grown = []
    with running_stack(options) as stack:
        for num_clients in args.clients:
            chosen = [next(numbers) for _ in range(args.num_clips)]
            samples = ask_about(stack, chosen, args, num_clients, console)
            table = section.add_table(f"{len(chosen)} clips, {num_clients} at a time", _COLUMNS)
            for row in growth(samples, num_warm_up=args.warm_up):
                series = [round(sample.get(row["process"], 0.0), 1) for sample in samples]
                table.add_row(list(_cells(row)), {**row, "series_mb": series})
                if row["growth"] >= MAX_GROWTH:
                    grown.append(f"{row['process']} grew by {row['growth']:.1%}")
    for problem in grown:
        section.add_note(problem)
    return 1 if grown else 0


def ask_about(
    stack: Stack,
    numbers: Sequence[int],
    args: argparse.Namespace,
    num_clients: int,
    console: Console,
) -> list[dict[str, float]]:
    """Returns the megabytes of each process after each answer, in order of answers."""
    samples: list[dict[str, float]] = []
    pids = {name: stack.child(name).pid for name in ("gateway", "draft", "target")}
    with (
        httpx.Client(base_url=stack.url, timeout=600, trust_env=False) as client,
        ThreadPoolExecutor(num_clients) as clients,
        progress_bar(console) as progress,
    ):
        for _ in progress.track(
            clients.map(_asker(client, args), numbers),
            total=len(numbers),
            description=f"{num_clients} at a time",
        ):
            samples.append(process_megabytes(pids))
    return samples


def _asker(client: httpx.Client, args: argparse.Namespace) -> Callable[[int], None]:
    def ask_one(number: int) -> None:
        width, height = _SIZES[number % len(_SIZES)]
        data = filmed_clip(number, width=width, height=height, num_frames=_FRAMES, fps=_FPS)
        url = "data:video/mp4;base64," + base64.b64encode(data).decode()
        answer = converse(
            client,
            [user_turn(url, f"What is clip {number} about?")],
            speculative={"policy": "adaptive"},
            max_tokens=args.max_tokens,
            ignores_end=True,
            further={"mm_processor_kwargs": {"max_pixels": _PIXELS_SEEN}},
        )
        assert answer.num_tokens == args.max_tokens, answer

    return ask_one


def process_megabytes(
    pids: Mapping[str, int], fields: Sequence[str] = WITHOUT_FILES
) -> dict[str, float]:
    """Returns the memory of each process in megabytes; that of its children is added up as
    ``NAME's worker``. ``fields`` of /proc/PID/status are added up."""
    found: dict[str, float] = {}
    for name, pid in pids.items():
        found[name] = _megabytes(pid, fields)
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(OSError):  # it has just ended
                worker = f"{name}'s worker"
                found[worker] = found.get(worker, 0.0) + _megabytes(child.pid, fields)
    return found


def _megabytes(pid: int, fields: Sequence[str]) -> float:
    """Returns the sum of fields in megabytes; raises OSError if the process has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(values.get(name, "0").split()[0]) for name in fields) * 1024 / 1e6


def growth(samples: Sequence[Mapping[str, float]], *, num_warm_up: int) -> list[dict[str, Any]]:
    """Returns a row for each process; see the module. Raises ValueError for too few samples."""
    counted = samples[num_warm_up:]
    width = min(_WINDOW, len(counted) // 2)
    if not width:
        raise ValueError(f"{len(samples)} clips: at least 2 more than the warm-up are needed")
    rows = []
    for name in counted[0]:
        series = [sample.get(name, 0.0) for sample in counted]
        before, after = statistics.median(series[:width]), statistics.median(series[-width:])
        rows.append(
            {"process": name, "warm_mb": before, "end_mb": after, "largest_mb": max(series),
             "growth": after / before - 1.0}
        )  # fmt: skip
    return rows


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield row["process"]
    yield from (f"{row[name]:,.0f}" for name in ("warm_mb", "end_mb"))
    yield f"{row['growth']:+.1%}"
    yield f"{row['largest_mb']:,.0f}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.answers.memory", __doc__)
    add = parser.add_argument
    add("--num-clips", type=int, default=500, help="of each number of clients")
    add("--warm-up", type=int, default=50, help="first clips that do not count")
    add("--clients", type=integers, default=[1, 8], help="numbers of clients, one after the other")
    add("--max-tokens", type=int, default=16, help="of each answer")
    add("--out", type=Path, default=ROOT / "bench/out", help="folder of the report")
    args = parser.parse_args(argv)
    if args.num_clips < args.warm_up + 2:
        parser.error(f"--num-clips must be at least --warm-up + 2 ({args.warm_up + 2})")
    return args


if __name__ == "__main__":
    sys.exit(main())
