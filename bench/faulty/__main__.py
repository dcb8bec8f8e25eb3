"""Compares adaptive with target-only under faults of the draft: ``python -m bench.faulty``.

Draft, gateway and this client run on one core, the target on another, as in ``python -m bench``.
For each fault a stack is started. Each clip is asked about with target-only, adaptive and
target-only again, ``--repeats`` times each; the run of median decode time counts.

    python -m bench.faulty                                         all faults, float32
    python -m bench.faulty --faults slow:10 --dtype bfloat16 --out bench/out/faulty-slow.json

tests/support/running/faults.py defines the faults.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.answers.runs import bundled_pair, run_systems, running_stack
from bench.answers.systems import TARGET_ONLY, systems
from bench.base.clips import held_out_clips
from bench.base.options import add_out, new_result, parser_of, write_result
from tests.support.running.faults import parse_fault

FAULTS = (
    "none",
    "random",
    "slow:10",
    "slow-then-quick:10,100",
    "stall:100,100",
    "stall:50,ever",
    "right-then-wrong:40,40",
    "right-then-wrong:30,ever",
)
_EVER_MS = 1500.0  # a stall that outlasts every answer


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints tables and writes JSON."""
    args = _parse(argv)
    result = new_result("bench.faulty", argv, dtype=args.dtype, runs=[])
    options = bundled_pair(args.dtype, draft_module="bench.faulty.draft")
    chosen = [each for each in systems("none", 0.0) if each.name in (TARGET_ONLY, "adaptive")]
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        clips = held_out_clips(Path(folder), kind="short", num_clips=args.num_clips)
        for fault in args.faults:
            given_fault = fault.replace("ever", f"{_EVER_MS:g}") if "stall" in fault else fault
            with running_stack(
                replace(options, draft_args=("--draft-fault", given_fault))
            ) as stack:
                _, run = run_systems(
                    console, stack.url, clips, chosen, title=f"{fault}, {args.dtype}",
                    num_repeats=args.repeats, has_timeline=True,
                )  # fmt: skip
            result["runs"].append({"fault": fault, **run})
            write_result(args.out, result)
    console.print(f"written to {args.out}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.faulty", __doc__)
    add = parser.add_argument
    add("--faults", nargs="+", default=list(FAULTS), help="see tests/support/running/faults.py")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--num-clips", type=int, default=10, help="held-out clips")
    add("--repeats", type=int, default=1, help="runs of each answer; the median one counts")
    add_out(parser, "faulty.json")
    args = parser.parse_args(argv)
    for fault in args.faults:
        try:
            parse_fault(fault)
        except ValueError as error:
            parser.error(str(error))
    return args


if __name__ == "__main__":
    main()
