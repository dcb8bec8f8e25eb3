"""How soon a pair serves, and what compiling beside the steps costs.

    python -m bench.start_time                      nothing kept; services with --compile auto
    python -m bench.start_time --compile wait       compiled before they serve
    python -m bench.start_time --kept FOLDER        with what FOLDER keeps

The bundled pair is started, draft and target at once, and asked about clips, target-only and
adaptive in turn, from its first moment on until some seconds after both services run compiled.
Answers are told by how many services had been compiled beside the steps when they were asked.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import httpx
from rich.console import Console
from rich.table import Table

from bench.client import ask, video_url
from bench.clips import held_out_clips
from bench.runs import STACK_LOG, bundled_pair
from hippo.cli.stack import Stack

_COMPILING, _NOW_COMPILED = "compiling a layer beside", "are compiled now"
_NOT_COMPILED = "steps are not compiled"
_SYSTEMS = {"target-only": {"policy": "off"}, "adaptive": {}}
_NUM_CLIPS = 4


class _Log:
    """The stack's log; counts the services that compile, and those that say they have."""

    def __init__(self) -> None:
        self.num_compiling = self.num_compiled = self.num_failed = 0
        self._lock = threading.Lock()
        STACK_LOG.parent.mkdir(parents=True, exist_ok=True)
        self._file = STACK_LOG.open("a", encoding="utf-8")

    def __call__(self, name: str, line: str) -> None:
        with self._lock:
            self.num_compiling += _COMPILING in line
            self.num_compiled += _NOW_COMPILED in line
            self.num_failed += _NOT_COMPILED in line
            self._file.write(f"{name}: {line}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Starts, asks, prints."""
    args = _parse(argv)
    console, log = Console(width=120), _Log()
    with tempfile.TemporaryDirectory() as folder, _nothing_kept(Path(folder)):
        kept = args.kept or str(Path(folder) / "kept")
        flags = ["--compile", args.compile]
        flags += [] if args.compile == "off" else ["--compile-cache", kept]
        options = bundled_pair(
            args.dtype,
            target_args=flags,
            draft_args=flags,
            gateway_args=("--calibration-share", "0"),
        )
        clips = held_out_clips(Path(folder), kind="short", num_clips=_NUM_CLIPS)
        began = time.monotonic()
        with Stack(options, log) as stack:
            stack.start()
            stack.wait_ready()
            console.print(f"the pair serves after {time.monotonic() - began:.1f} s")
            token_ids: dict[int, set[tuple[int, ...]]] = {}
            times: dict[tuple[int, str], list[float]] = {}
            time.sleep(1.0)  # for the last lines of the log
            is_late = log.num_compiling > 0
            with httpx.Client(base_url=stack.url, timeout=600, trust_env=False) as client:
                compiled_at = None if is_late else time.monotonic()
                for number in itertools.cycle(range(_NUM_CLIPS)):
                    if compiled_at is None and log.num_compiled == log.num_compiling:
                        compiled_at = time.monotonic()
                        console.print(f"all run compiled after {compiled_at - began:.0f} s")
                    if compiled_at is not None and time.monotonic() > compiled_at + args.seconds:
                        break
                    for name, speculative in _SYSTEMS.items():
                        num_compiled, clip = log.num_compiled, clips[number]
                        answer = ask(
                            client,
                            video_url(clip.path),
                            clip.question,
                            speculative=speculative,
                            seed=number,
                            is_video_first=clip.is_video_first,
                        )
                        token_ids.setdefault(number, set()).add(tuple(answer.token_ids))
                        decode_ms = answer.figures["timings_ms"]["decode"]
                        per_token = decode_ms / (answer.num_tokens - 1)
                        times.setdefault((num_compiled, name), []).append(per_token)
                    if log.num_failed or time.monotonic() > began + args.patience:
                        raise SystemExit(f"not compiled; see {STACK_LOG}")
    console.print(table(times, is_late=is_late))
    is_equal = all(len(different) == 1 for different in token_ids.values())
    console.print("all answers are equal" if is_equal else "[red]answers differ[/]")


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


@contextlib.contextmanager
def _nothing_kept(folder: Path) -> Iterator[None]:
    """TorchInductor's own caches are elsewhere, and empty."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    with mock.patch.dict(os.environ, places):
        yield


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.start_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--compile", choices=("auto", "wait", "off"), default="auto")
    parser.add_argument("--kept", metavar="FOLDER", help="default: an empty one")
    parser.add_argument("--dtype", default="float32", help="the target's (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="asked after it is compiled")
    parser.add_argument("--patience", type=float, default=900.0, help="most seconds in all")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
