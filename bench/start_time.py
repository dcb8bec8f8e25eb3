"""How soon a pair serves, and what compiling beside the steps costs: ``bench.start_time``.

    python -m bench.start_time                      nothing kept; services with --compile auto
    python -m bench.start_time --compile wait       compiled before they serve
    python -m bench.start_time --kept FOLDER        with what FOLDER keeps

The bundled pair is started, draft and target at once, and asked about clips, target-only and
adaptive in turn, from its first moment on until some seconds after both services run compiled.
Answers are told by how many services had been compiled beside the steps when they were asked.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import httpx
from rich.console import Console
from rich.table import Table

from bench.client import ask, video_url
from bench.clips import Clip, held_out_clips
from bench.runs import STACK_LOG, bundled_pair
from hippo.cli.stack import Stack

_COMPILING, _NOW_COMPILED = "compiling a layer beside", "are compiled now"
_NOT_COMPILED = "steps are not compiled"
_SYSTEMS = {"target-only": {"policy": "off"}, "adaptive": {}}
_NUM_CLIPS = 4


class _Log:
    """The stack's log; counts the services that compile, and those that say they have."""

    def __init__(self, file: TextIO) -> None:
        self.num_compiling = self.num_compiled = self.num_failed = 0
        self._file = file
        self._lock = threading.Lock()

    def __call__(self, name: str, line: str) -> None:
        with self._lock:
            self.num_compiling += _COMPILING in line
            self.num_compiled += _NOW_COMPILED in line
            self.num_failed += _NOT_COMPILED in line
            self._file.write(f"{name}: {line}\n")

    @property
    def is_settled(self) -> bool:
        """Whether no service compiles any more."""
        return self.num_compiled == self.num_compiling


@dataclass(slots=True)
class Found:
    """Milliseconds a token by the number of services compiled and the system; and the tokens."""

    times: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    token_ids: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)  # by clip

    @property
    def is_equal(self) -> bool:
        """Whether each clip had one answer at all times."""
        return all(len(different) == 1 for different in self.token_ids.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Starts, asks, prints; 1 when answers differ."""
    args, console = _parse(argv), Console(width=120)
    STACK_LOG.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, STACK_LOG.open("a", encoding="utf-8") as file:
        folder, log = Path(name), _Log(file)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # empty, too
        flags = ["--compile", args.compile]
        if args.compile != "off":
            flags += ["--compile-cache", args.kept or str(folder / "kept")]
        options = bundled_pair(
            args.dtype,
            target_args=flags,
            draft_args=flags,
            gateway_args=("--calibration-share", "0"),
        )
        clips = held_out_clips(folder, kind="short", num_clips=_NUM_CLIPS)
        began = time.monotonic()
        with Stack(options, log) as stack:
            stack.start()
            stack.wait_ready()
            console.print(f"the pair serves after {time.monotonic() - began:.1f} s")
            time.sleep(1.0)  # for the last lines of the log
            is_late = not log.is_settled
            found = _ask(stack.url, clips, log, args)
    console.print(table(found.times, is_late=is_late))
    console.print("all answers are equal" if found.is_equal else "[red]answers differ[/]")
    return 0 if found.is_equal else 1


def _ask(url: str, clips: Sequence[Clip], log: _Log, args: argparse.Namespace) -> Found:
    """Asks about the clips in turn until a while after the last service runs compiled."""
    found, began, until = Found(), time.monotonic(), None
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        for clip in itertools.cycle(clips):
            now = time.monotonic()
            if until is None and log.is_settled:
                until = now + args.seconds
            if until is not None and now > until:
                return found
            if log.num_failed or now > began + args.patience:
                raise SystemExit(f"not compiled; see {STACK_LOG}")
            for name, speculative in _SYSTEMS.items():
                num_compiled = log.num_compiled
                answer = ask(
                    client,
                    video_url(clip.path),
                    clip.question,
                    speculative=speculative,
                    is_video_first=clip.is_video_first,
                )
                found.token_ids.setdefault(clip.path.name, set()).add(tuple(answer.token_ids))
                per_token = answer.figures["timings_ms"]["decode"] / (answer.num_tokens - 1)
                found.times.setdefault((num_compiled, name), []).append(per_token)
    raise AssertionError("clips are asked about in turn, without end")


def table(times: Mapping[tuple[int, str], Sequence[float]], *, is_late: bool) -> Table:
    """A line for each stretch and system: milliseconds a token of decoding."""
    shown = Table(title="decoding, ms a token")
    for column in ("compiled since", "system"):
        shown.add_column(column)
    for column in ("answers", "median", "fastest", "slowest"):
        shown.add_column(column, justify="right")
    for (num_compiled, name), found in sorted(times.items(), reverse=True):
        figures = (statistics.median(found), min(found), max(found))
        shown.add_row(
            f"{num_compiled} of them" if is_late else "as at the start",
            name,
            str(len(found)),
            *(f"{figure:.2f}" for figure in figures),
        )
    return shown


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.start_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--compile",
        choices=("auto", "wait", "off"),
        default="auto",
        help="as the services' (default: %(default)s)",
    )
    parser.add_argument("--kept", metavar="FOLDER", help="default: an empty one")
    parser.add_argument("--dtype", default="float32", help="the target's (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="asked after it is compiled")
    parser.add_argument("--patience", type=float, default=900.0, help="most seconds in all")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
