"""Every policy against target-only decoding, on the bundled pair, through the real services.

Draft, gateway and this client run on one core, the target on another, standing for one device
each. Each clip is asked about by every system in turn, target-only first and last; speedups are
per clip against target-only on that clip.

    python -m bench                       everything: both kinds of prompt, both dtypes, rivals
    python -m bench --quick               three clips a kind, float32, no rivals
    python -m bench --kinds short --dtypes bfloat16 --temperatures 0,0.8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.clips import Kind, held_out_clips
from bench.environment import ROOT, describe_environment
from bench.measure import Record, measure
from bench.report import summarise, table
from bench.systems import TARGET_ONLY, System, systems
from hippo.cli.stack import BUNDLED_PAIR, Stack, StackOptions, default_cores


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints tables and writes JSON."""
    args = _parse(argv)
    console = Console()
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    target_core, draft_core = default_cores("cpu", "cpu")
    if draft_core is not None:
        os.sched_setaffinity(0, {draft_core})
    result: dict[str, Any] = {
        "command": "python -m bench " + " ".join(argv if argv is not None else sys.argv[1:]),
        "environment": describe_environment(),
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            clips_folder = Path(folder) / kind
            clips = held_out_clips(clips_folder, kind=cast(Kind, kind), num_clips=args.num_clips)
            for dtype in args.dtypes:
                options = StackOptions(
                    target_model=args.target_model,
                    draft_model=args.draft_model,
                    dtype=dtype,
                    target_core=target_core,
                    draft_core=draft_core,
                    port=0,
                    gateway_args=("--max-draft-tokens", "32"),
                )
                with _stack(options) as stack:
                    for temperature in args.temperatures:
                        wanted = _chosen(args.systems, systems(args.strategy, args.ratio))
                        total = len(clips) * (len(wanted) + 1)
                        records = []
                        with _progress(console) as progress:
                            task = progress.add_task(f"{kind} {dtype} T={temperature}", total=total)
                            for record in measure(
                                stack.url, clips, wanted, temperature=temperature
                            ):
                                records.append(record)
                                progress.advance(task)
                        rows = summarise(records)
                        title = f"{kind} prompts, {dtype}, T={temperature}, {len(clips)} clips"
                        console.print(table(title, rows))
                        result["runs"].append(_run(kind, dtype, temperature, args, rows, records))
                        out.write_text(json.dumps(result, indent=1), encoding="utf-8")
                if args.rivals and kind == "short":
                    rivals = _rivals(console, clips_folder, dtype, args, target_core)
                    result["runs"].extend(rivals)
                    out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    console.print(f"written to {out}")


def _rivals(
    console: Console, clips_folder: Path, dtype: str, args: argparse.Namespace, core: int | None
) -> list[dict[str, Any]]:
    """Target-only with both cores, and transformers' generate() with and without assistant."""
    runs: list[dict[str, Any]] = []
    both = StackOptions(
        target_model=args.target_model,
        draft_model=args.draft_model,
        dtype=dtype,
        port=0,
        target_args=("--num-threads", "2"),
    )
    clips = held_out_clips(clips_folder, kind="short", num_clips=args.num_clips)
    with _stack(both) as stack:
        records = list(measure(stack.url, clips, [System(TARGET_ONLY, {"policy": "off"})]))
    rows = summarise(records)
    console.print(table(f"rival: target-only with both cores, {dtype}", rows))
    runs.append(_run("short", dtype, 0.0, args, rows, records, rival="both cores"))
    rivals_out = clips_folder / "rivals.json"
    command = [
        *(sys.executable, "-m", "bench.rivals", "--clips", str(clips_folder)),
        *("--cores", str(core if core is not None else 0), "--dtype", dtype),
        *("--num-clips", str(args.num_clips), "--out", str(rivals_out)),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    runs.append(
        {
            "rival": "transformers generate() and generate(assistant_model=...), one core",
            "kind": "short",
            "dtype": dtype,
            "records": json.loads(rivals_out.read_text(encoding="utf-8")),
        }
    )
    return runs


def _run(
    kind: str,
    dtype: str,
    temperature: float,
    args: argparse.Namespace,
    rows: list[dict[str, Any]],
    records: list[Record],
    **extra: Any,
) -> dict[str, Any]:
    return {
        "kind": kind,
        "dtype": dtype,
        "temperature": temperature,
        "pruning": {"strategy": args.strategy, "ratio": args.ratio},
        "summary": rows,
        "records": [record.as_dict() for record in records],
        **extra,
    }


class _stack:
    """The stack with its models warm; its log goes to bench/out/stack.log."""

    def __init__(self, options: StackOptions) -> None:
        log = ROOT / "bench/out/stack.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("a", encoding="utf-8")
        self._stack = Stack(options, self._write)

    def _write(self, name: str, line: str) -> None:
        self._log.write(f"{name}: {line}\n")

    def __enter__(self) -> Stack:
        self._stack.start()
        self._stack.wait_ready()
        return self._stack

    def __exit__(self, *exc_info: object) -> None:
        self._stack.stop()
        self._log.close()


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _chosen(names: Sequence[str], every: Sequence[System]) -> list[System]:
    if not names:
        return list(every)
    wanted = [system for system in every if system.name.replace(" ", "").startswith(tuple(names))]
    if not wanted:
        known = ", ".join(system.name.replace(" ", "") for system in every)
        raise SystemExit(f"--systems {','.join(names)}: none of these begins so: {known}")
    return wanted


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", type=listed, default=["short", "long"])
    parser.add_argument("--dtypes", type=listed, default=["float32", "bfloat16"])
    parser.add_argument(
        "--temperatures", type=lambda text: [float(part) for part in listed(text)], default=[0.0]
    )
    parser.add_argument("--systems", type=listed, default=[], help="beginnings of names, no spaces")
    parser.add_argument("--num-clips", type=int, default=20)
    parser.add_argument("--strategy", default="uniform", help="pruning strategy of the draft")
    parser.add_argument("--ratio", type=float, default=0.9, help="share of visual tokens pruned")
    parser.add_argument("--target-model", default=str(BUNDLED_PAIR / "target"))
    parser.add_argument("--draft-model", default=str(BUNDLED_PAIR / "draft"))
    parser.add_argument("--rivals", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="three clips, float32, no rivals")
    parser.add_argument("--out", default=str(ROOT / "bench/out/bench.json"))
    args = parser.parse_args(argv)
    if args.quick:
        args.num_clips, args.dtypes, args.rivals = 3, ["float32"], False
    return args


if __name__ == "__main__":
    main()
