"""Fuzzing of everything that strangers can send: ``python -m tests.fuzz media``.

``media``: mutated files through the decoder; ``draft-stream`` and ``target-stream``: streams of
random and mutated messages to real services around a toy model. Inputs are numbered, and each can
be made again from the seed and its number. Bodies of REST requests are schemathesis's:
``pytest tests/e2e/answers/test_openapi.py``.
"""

import argparse
import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rich.console import Console

from hippo.client.tables import progress_bar
from tests.fuzz.findings import Findings, num_children
from tests.fuzz.media import fuzz_media
from tests.fuzz.streams import fuzz_streams

NAMES = ("media", "draft-stream", "target-stream")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one of them; exits with 1 if something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=NAMES)
    parser.add_argument("--inputs", type=int, default=10_000, help="how many to try")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.inputs < 1:
        parser.error("--inputs must be at least 1")
    os.environ.setdefault("SVT_LOG", "1")  # an encoder that says much otherwise
    logging.getLogger().addHandler(logging.NullHandler())  # each refusal is logged
    console = Console()
    with progress_bar(console) as progress:
        task = progress.add_task(args.what, total=args.inputs)
        findings = run(args.what, args.inputs, args.seed, lambda: progress.advance(task))
    num_inputs, num_failures = findings.outcomes.total(), len(findings.failures)
    console.print(f"{args.what}: {num_inputs:,} inputs, {num_failures} failures")
    for outcome, count in findings.outcomes.most_common(20):
        console.print(f"  {count:>8,}  {outcome}", markup=False)
    console.print(", ".join(f"{value:,.0f} {name}" for name, value in findings.figures.items()))
    for failure in findings.failures[:20]:
        console.print(failure, markup=False)
    if findings.failures:
        raise SystemExit(1)


def run(name: str, num_inputs: int, seed: int, advance: Callable[[], None]) -> Findings:
    """Tries ``num_inputs`` inputs of the kind ``name``; ``advance`` is called after each."""
    findings = Findings(seed)
    work: Coroutine[Any, Any, None]
    if name == "media":
        work = fuzz_media(num_inputs, findings, advance)
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
