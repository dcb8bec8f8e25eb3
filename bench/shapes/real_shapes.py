"""A model of published shape on a CPU, end to end: ``python -m bench.shapes.real_shapes``.

    python -m bench.shapes.real_shapes            Qwen2.5-VL-3B's shape, with a draft of four layers
    python -m bench.shapes.real_shapes --small    the same with small models, for a trial

Random weights in bfloat16 (bench/shapes/random_pair.py) are written to --work, 11 GB. The services
load them, and the gateway is asked about a clip of 1920 x 1080 pixels: target-only, then with the
draft. Exits with 1 if the answers differ, or if a service's memory exceeds by more than 10 % what
`hippo sizes --cpu` computes for the same slots, context and caches (not with --small, where the
libraries take most). Memory is the resident memory without pages of files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.answers.systems import systems
from bench.base.clips import filmed_clip
from bench.base.environment import ROOT
from bench.base.options import parser_of
from bench.base.report import Report
from bench.base.tables import wide_console
from bench.shapes.random_pair import PairForm, write_pair
from bench.shapes.served import ANSWER_COLUMNS, NamedClip, answer_cells, answer_rows, watched_stack
from hippo.cli.stack import StackOptions

MAX_OVER = 1.1
_NAME = "Qwen/Qwen2.5-VL-3B-Instruct"
_DRAFT_LAYERS = 4
_SHARE = 0.9
_SYSTEMS = ("serial γ=5", "adaptive")
_MAX_PIXELS = 768 * 28 * 28  # of a frame, as in the model's reference code
_NUM_TOKENS = 4096  # of a slot
_CACHES_MB = 64  # of the features of earlier media, and of their frames: more than the clip has


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes the report and returns the exit code."""
    args = _parse(argv)
    console = wide_console()
    report = Report(args.out, "real_shapes", console=console, is_small=args.small)
    section = report.begin_section("real shapes")
    width, height = (160, 90) if args.small else (1920, 1080)
    data = filmed_clip(0, width=width, height=height, num_frames=30 * args.clip_seconds)
    clip = NamedClip(f"{args.clip_seconds} s of {width} x {height}", data, _MAX_PIXELS)
    with tempfile.TemporaryDirectory(prefix="hippo-shapes-", dir=args.work) as work:
        form = PairForm(
            _NAME,
            _NAME,
            (_SHARE,),
            draft_layers=1 if args.small else _DRAFT_LAYERS,
            is_published_size=not args.small,
        )
        target, draft = write_pair(Path(work), form, progress=lambda line: console.print(line))
        options = _options(target, draft)
        table = section.add_table("answers", ANSWER_COLUMNS)
        rows = []
        with watched_stack(
            options, section, num_tokens=_NUM_TOKENS, num_slots=1, caches_mb=_CACHES_MB
        ) as (stack, memories):
            chosen = [each for each in systems("holistic", 0.9) if each.name in _SYSTEMS]
            for row in answer_rows(
                stack.url, [clip], (_SHARE,), chosen, max_tokens=args.max_tokens
            ):
                rows.append(row)
                table.add_row(answer_cells(row), row)
    problems = [f"the answer of {row['system']} differs" for row in rows if not row["is_equal"]]
    problems += [
        f"the {row['where']} took {row['seen'] / row['computed']:.2f} times what is computed"
        for row in memories
        if not args.small and row["computed"] and row["seen"] > MAX_OVER * row["computed"]
    ]
    for problem in problems:
        section.add_note(problem)
    console.print(f"written to {args.out}/real_shapes.md and real_shapes.json")
    return 1 if problems else 0


def _options(target: Path, draft: Path) -> StackOptions:
    caches = ("--vision-cache-mb", str(_CACHES_MB), "--media-cache-mb", str(_CACHES_MB))
    common = ("--slots", "1", "--max-context-length", str(_NUM_TOKENS), *caches)
    # A draft of this size may need more than the default 5 s for a step on a busy CPU.
    patient = ("--draft-stall-s", "120", "--request-timeout-s", "0")
    return StackOptions(
        target_model=str(target),
        draft_model=str(draft),
        dtype="bfloat16",
        draft_dtype="bfloat16",
        port=0,
        target_args=common,
        draft_args=common,
        gateway_args=patient,
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.shapes.real_shapes", __doc__)
    add = parser.add_argument
    add("--small", action="store_true", help="small models and a small clip")
    add("--clip-seconds", type=int, default=4)
    add("--max-tokens", type=int, default=32)
    add("--work", type=Path, default=Path(tempfile.gettempdir()), help="where weights are written")
    add("--out", type=Path, default=ROOT / "bench/out")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
