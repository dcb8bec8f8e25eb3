"""Asks about many different clips and watches the memory of each process.

    python -m bench.answers.memory                               500 clips, one a time, then eight
    python -m bench.answers.memory --num-clips 80 --warm-up 20   a short trial

All clips differ in every frame, so that no cache knows one, and the caches of media and features
are small, so that they are full after the first clips. The bundled pair answers about each clip.
The growth of a process is its median memory over the last 25 clips, compared with that over the
first 25 after the warm-up. Exits with 1 if a process grew by 5 % or more. Memory is the resident
memory without pages of files, which the kernel drops when memory is short.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench.answers.runs import FORM, bundled_pair, pids_of, running_stack
from bench.base.clips import data_url, filmed_clip
from bench.base.environment import ROOT
from bench.base.options import integers, parser_of
from bench.base.report import Report
from bench.base.tables import wide_console
from hippo.cli.stack import Stack
from hippo.client.requests import question_about
from hippo.client.server import Server
from hippo.client.tables import watched

MAX_GROWTH = 0.05
WITHOUT_FILES = ("RssAnon", "RssShmem")
LARGEST_RESIDENT = ("VmHWM",)
_SLOTS = 8
_SIZES = ((640, 360), (360, 640), (480, 360), (854, 480))  # width and height, in turn
_FRAMES, _FPS = 12, 4
_WINDOW = 25  # answers
_PIXELS_SEEN = 28 * 28 * 24  # in a resized frame
_COLUMNS = {
    "process": ("process", ""),
    "after the warm-up, MB": ("warm_mb", ",.0f"),
    "at the end, MB": ("end_mb", ",.0f"),
    "growth": ("growth", "+.1%"),
    "largest, MB": ("largest_mb", ",.0f"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Asks and writes a report with a table for each number of clients; returns the exit code."""
    args = _parse(argv)
    caches = ["--vision-cache-mb", "2", "--media-cache-mb", "8", "--slots", str(_SLOTS)]
    caches += ["--max-context-length", "4096"]
    options = bundled_pair("float32", target_args=caches, draft_args=caches)
    console, numbers = wide_console(), iter(range(len(args.clients) * args.num_clips))
    report = Report(args.out, "memory", console=console)
    report.begin_section("memory")
    grown = []
    with running_stack(options) as stack:
        for num_clients in args.clients:
            chosen = [next(numbers) for _ in range(args.num_clips)]
            samples = ask_about(stack, chosen, args, num_clients, console)
            report.begin_table(f"{len(chosen)} clips, {num_clients} at a time", _COLUMNS)
            for row in growth(samples, num_warm_up=args.warm_up):
                series = [round(sample.get(row["process"], 0.0), 1) for sample in samples]
                report.add_row({**row, "series_mb": series})
                if row["growth"] >= MAX_GROWTH:
                    grown.append(f"{row['process']} grew by {row['growth']:.1%}")
    for problem in grown:
        report.add_note(problem)
    return 1 if grown else 0


def ask_about(
    stack: Stack,
    numbers: Sequence[int],
    args: argparse.Namespace,
    num_clients: int,
    console: Console,
) -> list[dict[str, float]]:
    """Returns the megabytes of each process after each answer, in order of answers."""
    pids, server = pids_of(stack), Server(stack.url)
    form = replace(
        FORM,
        max_tokens=args.max_tokens,
        further={"ignore_eos": True, "mm_processor_kwargs": {"max_pixels": _PIXELS_SEEN}},
    )

    def ask(number: int) -> None:
        width, height = _SIZES[number % len(_SIZES)]
        data = filmed_clip(number, width=width, height=height, num_frames=_FRAMES, fps=_FPS)
        question = question_about(f"What is clip {number} about?", data_url(data))
        with closing(server.connect()) as connection:
            answer = connection.ask(form.request(question, {"policy": "adaptive"}).body())
        assert answer.num_tokens == args.max_tokens, answer

    with ThreadPoolExecutor(num_clients) as clients:
        samples = (process_megabytes(pids) for _ in clients.map(ask, numbers))
        return watched(samples, console, title=f"{num_clients} at a time", total=len(numbers))


def process_megabytes(
    pids: Mapping[str, int], fields: Sequence[str] = WITHOUT_FILES
) -> dict[str, float]:
    """Returns the memory of each process in megabytes, and the memory of its children together as
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
