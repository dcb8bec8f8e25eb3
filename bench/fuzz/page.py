"""The fuzzing section of docs/reliability.md, from what the runs wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.environment import ROOT
from bench.page import machine_line
from bench.sections import replace_section

PAGE = ROOT / "docs/reliability.md"


def write_page(paths: Iterable[Path]) -> None:
    """Rewrites the section between the page's markers; SystemExit when a run is missing."""
    runs = []
    for path in paths:
        if not path.exists():
            name = path.stem.removeprefix("fuzz-")
            raise SystemExit(f"there is no {path}: run python -m bench.fuzz {name} first")
        runs.append(json.loads(path.read_text(encoding="utf-8")))
    replace_section(PAGE, "fuzz", fuzz_section(runs))


def fuzz_section(runs: Iterable[Mapping[str, Any]]) -> str:
    """A table with a line a run, and what their inputs came to; SystemExit when the runs are of
    different machines or versions."""
    runs = list(runs)
    machines = {run["name"]: machine_line(run["environment"]) for run in runs}
    if len(set(machines.values())) != 1:
        raise SystemExit(f"runs of different machines or versions are no one table: {machines}")
    times = sorted(run["environment"]["time"] for run in runs)
    lines = [
        f"Ended between {times[0]} and {times[-1]}: {machines[runs[0]['name']]}",
        "",
        "| command | commit | inputs tried | failures | processes left | seconds | held |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        figures = dict(run["figures"])
        num_left = figures.pop("processes left")
        held = "; ".join(f"{value:,.0f} {name}" for name, value in figures.items())
        lines.append(
            f"| `{run['command']}` | `{run['environment']['commit']}` | {run['num_inputs']:,} "
            f"| {run['num_failures']:,} | {num_left:,} | {run['seconds']:,.0f} | {held} |"
        )
    total = sum(run["num_inputs"] for run in runs)
    failures = sum(run["num_failures"] for run in runs)
    lines += [
        f"| all | | {total:,} | {failures:,} | | | |",
        "",
        "What they came to, most frequent first:",
    ]
    for run in runs:
        outcomes = list(run["outcomes"].items())
        shown = "; ".join(f"{name} {count:,}" for name, count in outcomes[:8])
        more = f"; {len(outcomes) - 8} others" if len(outcomes) > 8 else ""
        lines += ["", f"- {run['name']}: {shown}{more}."]
    return "\n".join(lines)
