"""Compares every policy with target-only decoding on the bundled pair, through the services.

Draft, gateway and this client run on one core, the target on another; each core stands for a
device. Every system answers about each clip in turn, target-only first and last. The speedup of an
answer is against target-only on the same clip.

    python -m bench                       all: both kinds of prompt, all dtypes, rivals
    python -m bench --quick               three clips per kind, float32, no rivals
    python -m bench --kinds short --dtypes float32 --temperatures 0,0.8 --no-rivals
    python -m bench --draft-model random --systems adaptive    a draft that is never right
    python -m bench --draft-model 85%     a draft that agrees on about 85 % of tokens

`python -m bench.pages.results` writes the figures into docs/results.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from bench.answers.margins import first_differences
from bench.answers.runs import bundled_pair, run_systems, run_transformers, running_stack
from bench.answers.systems import TARGET_ONLY, System, systems
from bench.base.clips import ClipFile, Kind, held_out_clips
from bench.base.options import add_out, names, new_result, numbers, parser_of, write_result
from bench.base.tables import wide_console
from bench.drafts.weaker import BUNDLED, HELP, find_draft
from hippo.cli.stack import BUNDLED_PAIR, StackOptions

RIVAL_DTYPES = ("float32", "bfloat16")  # that transformers supports on a CPU


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
            draft_model = find_draft(args.draft_model, Path(folder), cast(Kind, kind))
            clips = held_out_clips(clips_folder, kind=cast(Kind, kind), num_clips=args.num_clips)
            for dtype in args.dtypes:
                options = replace(pair, dtype=dtype, draft_model=draft_model)
                _measure_engine(console, result, clips, kind, options, args)
                if args.rivals and kind == "short" and dtype in RIVAL_DTYPES:
                    _measure_rivals(console, result, clips, clips_folder, options, args)
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
    ratio = args.ratio if kind == "long" else args.short_ratio
    strategy = args.strategy if ratio else "none"
    chosen = _chosen(args.systems, systems(strategy, ratio))
    facts = {
        "kind": kind,
        "dtype": options.dtype,
        "draft_dtype": options.dtype_of_draft,
        "pruning": {"strategy": strategy, "ratio": ratio},
        "draft": args.draft_model,
    }
    runs = []
    with running_stack(options) as stack:
        for temperature in args.temperatures:
            title = f"{kind} prompts, {options.dtype}, T={temperature:g}"
            records, run = run_systems(
                console, stack.url, clips, chosen, title=title, temperature=temperature,
                num_repeats=args.repeats, has_timeline=args.timeline,
            )  # fmt: skip
            runs.append((records, {**facts, **run}))
    for records, run in runs:
        if run["temperature"] == 0:
            run["differences"] = first_differences(
                records, clips, model=options.target_model, dtype=options.dtype
            )
        result["runs"].append(run)


def _measure_rivals(
    console: Console,
    result: dict[str, Any],
    clips: Sequence[ClipFile],
    clips_folder: Path,
    options: StackOptions,
    args: argparse.Namespace,
) -> None:
    """Measures target-only on both cores, and transformers' generate() on one."""
    facts = {"kind": "short", "dtype": options.dtype}
    both_cores = replace(
        options, target_core=None, draft_core=None, target_args=("--num-threads", "2")
    )
    with _unpinned(options), running_stack(both_cores) as stack:
        off = System(TARGET_ONLY, {"policy": "off"})
        title = f"rival: target-only with both cores, {options.dtype}"
        _, run = run_systems(console, stack.url, clips, [off], title=title)
    pruning = {"strategy": "none", "ratio": 0.0}
    result["runs"].append({**facts, "pruning": pruning, "rival": "both cores", **run})
    records = run_transformers(
        clips_folder, core=options.target_core, dtype=options.dtype, num_clips=args.num_clips
    )
    name = "transformers' generate(), alone and with assistant_model, on one core"
    result["runs"].append({**facts, "rival": name, "records": records})


@contextmanager
def _unpinned(options: StackOptions) -> Iterator[None]:
    """Lets this process, and so processes that it starts, use the cores of both models."""
    if options.target_core is None or options.draft_core is None:  # nothing is pinned
        yield
        return
    os.sched_setaffinity(0, {options.target_core, options.draft_core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, {options.draft_core})


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
    add("--timeline", action="store_true", help="keep every verdict and block in the JSON")
    add("--strategy", default="holistic", help="how the draft's visual tokens are chosen")
    add("--ratio", type=float, default=0.9, help="share pruned on long prompts")
    add("--short-ratio", type=float, default=0.0, help="share pruned on short prompts")
    add("--target-model", default=str(BUNDLED_PAIR / "target"))
    add("--draft-model", default=BUNDLED, help=HELP)
    add("--draft-dtype", help="default: the draft service's own, float16 on a CPU")
    add("--rivals", action=argparse.BooleanOptionalAction, default=True)
    add("--quick", action="store_true", help="three clips, float32, no rivals")
    add_out(parser, "bench.json")
    args = parser.parse_args(argv)
    if args.quick:
        args.num_clips, args.dtypes, args.rivals = 3, ["float32"], False
    return args


if __name__ == "__main__":
    main()
