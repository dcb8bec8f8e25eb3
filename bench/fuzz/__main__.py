"""Fuzzing of everything that strangers can send: ``python -m bench.fuzz media --inputs 10000``.

``media``: mutated files through the decoder; ``draft-stream`` and ``target-stream``: streams of
random and mutated messages to real services around a toy model; ``chat``: mutated bodies of chat
completions. Inputs are numbered, and each can be made again from the seed and its number.
``page`` puts the runs into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.fuzz.chat import fuzz_chat
from bench.fuzz.findings import Findings, num_children, out_path
from bench.fuzz.media import fuzz_media
from bench.fuzz.page import write_page
from bench.fuzz.streams import fuzz_streams
from hippo.benchmark.tables import progress_bar

NAMES = ("media", "draft-stream", "target-stream", "chat")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one of them; exits with 1 if something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=(*NAMES, "page"))
    parser.add_argument("--inputs", type=int, default=10_000, help="how many to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file; default: bench/out/fuzz-WHAT.json")
    args = parser.parse_args(argv)
    if args.what == "page":
        write_page(out_path(name) for name in NAMES)
        return
    if args.inputs < 1:
        parser.error("--inputs must be at least 1")
    os.environ.setdefault("SVT_LOG", "1")  # an encoder that says much otherwise
    logging.getLogger().addHandler(logging.NullHandler())  # each refusal is logged
    console = Console()
    with progress_bar(console) as progress:
        task = progress.add_task(args.what, total=args.inputs)
        findings = run(args.what, args.inputs, args.seed, lambda: progress.advance(task))
    command = ["python -m bench.fuzz", *(sys.argv[1:] if argv is None else argv)]
    findings.write(args.out or out_path(args.what), command)
    console.print(f"{args.what}: {findings.num_inputs:,} inputs, {findings.num_failures} failures")
    for outcome, count in findings.outcomes.most_common(20):
        console.print(f"  {count:>8,}  {outcome}", markup=False)
    for failure in findings.failures[:20]:
        console.print(failure, markup=False)
    if findings.num_failures:
        raise SystemExit(1)


def run(name: str, num_inputs: int, seed: int, advance: Callable[[], None]) -> Findings:
    """Tries ``num_inputs`` inputs of the kind ``name``; ``advance`` is called after each."""
    findings = Findings(name, seed)
    work: Coroutine[Any, Any, None]
    if name == "media":
        work = fuzz_media(num_inputs, findings, advance)
    elif name == "chat":
        work = fuzz_chat(num_inputs, findings, advance)
    else:
        work = fuzz_streams(name, num_inputs, findings, advance)
    num_before = num_children()
    asyncio.run(work)
    num_left = num_children() - num_before
    if num_left:
        findings.fail(num_inputs, f"{num_left} processes are left")
    findings.figures["processes left"] = num_left
    return findings


if __name__ == "__main__":
    main()
