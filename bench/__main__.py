"""Compares every policy with target-only decoding on the bundled pair, through the services.

Draft, gateway and this client run on one core, the target on another; each core stands for a
device. Every system answers about each clip in turn, target-only first and last. The speedup of an
answer is against target-only on the same clip.

    python -m bench                       all: both kinds of prompt, all dtypes
    python -m bench --quick               three clips per kind, float32
    python -m bench --kinds short --dtypes float32 --temperatures 0,0.8
    python -m bench --draft-model random --systems adaptive    a draft that is never right
    python -m bench --draft-model 85%     a draft that agrees on about 85 % of tokens

`python -m bench.pages.results` writes the figures into docs/results.md.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.answers.runs import bundled_pair, run_systems, running_stack
from bench.answers.systems import System, systems
from bench.base.clips import ClipFile, held_out_clips
from bench.base.options import add_out, names, new_result, numbers, parser_of, write_result
from bench.base.tables import wide_console
from bench.drafts.weaker import BUNDLED, HELP, find_draft
from hippo.cli.stack import BUNDLED_PAIR, StackOptions


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints tables and writes JSON."""
    args = _parse(argv)
    changes = {"target_model": args.target_model, "draft_dtype": args.draft_dtype}
    pair = bundled_pair(args.dtypes[0], **changes)  # pins this process, so only once
    result = new_result("bench", argv, runs=[])
    console = wide_console()
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            clips_folder = Path(folder) / kind
            draft_model = find_draft(args.draft_model, Path(folder), kind)
            clips = held_out_clips(clips_folder, kind=kind, num_clips=args.num_clips)
            for dtype in args.dtypes:
                options = replace(pair, dtype=dtype, draft_model=draft_model)
                _measure_engine(console, result, clips, kind, options, args)
                write_result(args.out, result)
    console.print(f"written to {args.out}")


def _measure_engine(
    console: Console,
    result: dict[str, Any],
    clips: Sequence[ClipFile],
    kind: str,
    options: StackOptions,
    args: argparse.Namespace,
) -> None:
    """Measures every chosen system at every temperature on one stack."""
    ratio = args.ratio if kind == "long" else 0.0
    strategy = "holistic" if ratio else "none"
    chosen = _chosen(args.systems, systems(strategy, ratio))
    facts = {
        "kind": kind,
        "dtype": options.dtype,
        "draft_dtype": options.dtype_of_draft,
        "pruning": {"strategy": strategy, "ratio": ratio},
        "draft": args.draft_model,
    }
    with running_stack(options) as stack:
        for temperature in args.temperatures:
            title = f"{kind} prompts, {options.dtype}, T={temperature:g}"
            _, run = run_systems(
                console, stack.url, clips, chosen, title=title, temperature=temperature,
                num_repeats=args.repeats,
            )  # fmt: skip
            result["runs"].append({**facts, **run})


def _chosen(wanted: Sequence[str], every: Sequence[System]) -> list[System]:
    if not wanted:
        return list(every)
    chosen = [system for system in every if system.name.replace(" ", "").startswith(tuple(wanted))]
    if not chosen:
        known = ", ".join(system.name.replace(" ", "") for system in every)
        raise SystemExit(f"--systems {','.join(wanted)}: none of these begins so: {known}")
    return chosen


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench", __doc__)
    add = parser.add_argument
    add("--kinds", type=names, default=["short", "long"], help="short, long")
    add("--dtypes", type=names, default=["float32", "bfloat16", "float16"])
    add("--temperatures", type=numbers, default=[0.0], help="such as 0,0.8")
    add("--systems", type=names, default=[], help="beginnings of names, without spaces")
    add("--num-clips", type=int, default=20, help="held-out clips per kind")
    add("--repeats", type=int, default=1, help="runs of each answer; the median one counts")
    add("--ratio", type=float, default=0.9, help="share pruned on long prompts")
    add("--target-model", default=str(BUNDLED_PAIR / "target"))
    add("--draft-model", default=BUNDLED, help=HELP)
    add("--draft-dtype", help="default: the draft service's own, float16 on a CPU")
    add("--quick", action="store_true", help="three clips, float32")
    add_out(parser, "bench.json")
    args = parser.parse_args(argv)
    if args.quick:
        args.num_clips, args.dtypes = 3, ["float32"]
    return args


if __name__ == "__main__":
    main()
