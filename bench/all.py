"""Runs every latency and load benchmark of the bundled pair, then writes the page.

    python -m bench.all                       all: 25 to 45 minutes on two idle cores
    python -m bench.all --list                lists the commands and their durations
    python -m bench.all --only short,load     some of them
    python -m bench.all --quick               a few answers each, to check that all works

The page contains all files in bench/out, from this run or an earlier one; --quick and
--no-publish do not write it. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.base.environment import ROOT
from bench.base.options import names, parser_of

OUT = ROOT / "bench/out"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A command of this folder without its ``--out``."""

    name: str
    module: str
    arguments: str
    quick: str  # further arguments for a short run
    minutes: float

    def command(self, *, is_quick: bool) -> list[str]:
        """Returns the arguments of ``python -m``."""
        arguments = shlex.split(f"{self.arguments} {self.quick if is_quick else ''}")
        out = self.out(is_quick=is_quick).relative_to(ROOT)
        return [self.module, *arguments, "--out", str(out)]

    def out(self, *, is_quick: bool) -> Path:
        """Returns the file that the command writes."""
        return OUT / f"{'quick-' if is_quick else ''}{self.name}.json"


_QUICK_LATENCY = "--num-clips 1 --systems adaptive"
_QUICK_LOAD = "--clients 1,2 --num-clips 2 --answers 2 --rounds 1 --max-tokens 16"
BENCHMARKS = (
    Benchmark(
        "short",
        "bench",
        "--kinds short --dtypes float32,bfloat16 --temperatures 0,0.8",
        _QUICK_LATENCY,
        8.5,
    ),
    Benchmark("half", "bench", "--kinds short --dtypes float16 --no-rivals", _QUICK_LATENCY, 1.2),
    Benchmark(
        "long",
        "bench",
        "--kinds long --dtypes float32,bfloat16 --temperatures 0,0.8 --num-clips 6 "
        "--systems serialγ=10,vpsd,adaptive --no-rivals",
        _QUICK_LATENCY,
        2.6,
    ),
    Benchmark(
        "random",
        "bench",
        "--kinds short --dtypes float32 --draft-model random --systems adaptive --repeats 3 "
        "--num-clips 8 --no-rivals",
        _QUICK_LATENCY,
        1.2,
    ),
    Benchmark("load", "bench.load", "--rounds 2", _QUICK_LOAD, 4.7),
    Benchmark(
        "load-bfloat16",
        "bench.load",
        "--dtype bfloat16 --clients 1,8 --systems target-only,adaptive",
        _QUICK_LOAD,
        1.1,
    ),
    Benchmark(
        "load-long",
        "bench.load",
        "--kind long --clients 1,8 --systems target-only,adaptive --num-clips 12 --answers 12 "
        "--rounds 1",
        _QUICK_LOAD,
        1.4,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen benchmarks and writes the page; returns the first non-zero exit code."""
    args = _parse(argv)
    steps = [step for step in BENCHMARKS if not args.only or step.name in args.only]
    console = Console()
    if args.list:
        console.print(_table(steps, is_quick=args.quick, seconds=[]))
        return 0
    OUT.mkdir(parents=True, exist_ok=True)
    seconds: list[float] = []
    for step in steps:
        begin = time.monotonic()
        code = _run(console, step.command(is_quick=args.quick))
        seconds.append(time.monotonic() - begin)
        if code:
            return code
    console.print(_table(steps, is_quick=args.quick, seconds=seconds))
    return 0 if args.quick or not args.publish else _run(console, ["bench.pages.results"])


def _run(console: Console, command: Sequence[str]) -> int:
    console.rule(f"python -m {shlex.join(command)}", align="left", style="dim")
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode


def _table(steps: Sequence[Benchmark], *, is_quick: bool, seconds: Sequence[float]) -> Table:
    table = Table(title="minutes" if seconds else "minutes, on two quiet cores")
    table.add_column("step")
    table.add_column("minutes", justify="right")
    table.add_column("command", overflow="fold")
    for place, step in enumerate(steps):
        minutes = seconds[place] / 60 if seconds else step.minutes
        shown = "-" if is_quick and not seconds else f"{minutes:.1f}"
        table.add_row(step.name, shown, f"python -m {shlex.join(step.command(is_quick=is_quick))}")
    if not is_quick or seconds:
        total = sum(seconds) / 60 if seconds else sum(step.minutes for step in steps)
        table.add_row("all", f"{total:.1f}", "")
    return table


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.all", __doc__)
    add = parser.add_argument
    add("--only", type=names, default=[], help=", ".join(step.name for step in BENCHMARKS))
    add("--list", action="store_true", help="run nothing")
    add("--quick", action="store_true", help="a few answers each; publishes nothing")
    add("--publish", action=argparse.BooleanOptionalAction, default=True, help="write the page")
    args = parser.parse_args(argv)
    if unknown := set(args.only) - {step.name for step in BENCHMARKS}:
        parser.error(f"--only: no {', '.join(sorted(unknown))}")
    return args


if __name__ == "__main__":
    sys.exit(main())
