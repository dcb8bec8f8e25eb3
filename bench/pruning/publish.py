"""Puts measured figures into docs/results-pruning.md, its pictures and docs/results-pruning.json.

    python -m bench.pruning.publish [FOLDER]

FOLDER is where `python -m bench.pruning` wrote (default: bench/out/pruning); experiments that
have not been run there keep no place in the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.environment import ROOT
from bench.pruning import tables
from bench.pruning.plots import DRAWERS, draw_all
from bench.pruning.traces import CACHE
from bench.publish import environment_line, replace_measured

_SECTIONS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "ratio": ("Strategies by ratio", tables.ratio_tables),
    "costs": ("What the draft costs by ratio", tables.cost_tables),
    "bias": ("Position bias", tables.bias_tables),
    "ablation": ("One thing changed at a time", tables.ablation_tables),
    "confirm": ("Strategies again, on other clips", tables.agreement_table),
    "kinds": ("By kind of question, order and place", tables.kind_tables),
    "first-token": ("Time to first token", tables.first_token_table),
    "strategies": ("Strategies by ratio, through the services", tables.online_tables),
    "policies": ("Policies, and the two papers' systems", tables.online_tables),
    "overlap": ("Layers tapped, and no overlap of the prefills", tables.online_tables),
    "frames": ("By number of frames", tables.online_tables),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the experiments' JSON and rewrites page, pictures and JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pruning.publish",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, nargs="?", default=CACHE)
    args = parser.parse_args(argv)
    results = read_results(args.folder)
    if not results:
        raise SystemExit(f"{args.folder} has no results: run `python -m bench.pruning` first")
    docs = ROOT / "docs"
    replace_measured(docs / "results-pruning.md", page(results))
    draw_all(results, docs)
    target = docs / "results-pruning.json"
    target.write_text(json.dumps(list(results.values()), indent=1) + "\n", encoding="utf-8")


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The experiments that have been run, in the page's order."""
    paths = {name: folder / f"{name}.json" for name in _SECTIONS}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The measured part of the page."""
    parts = []
    if "ratio" in results:
        parts.append("## What was asked for\n\n" + "\n".join(criteria(results)))
    for name, result in results.items():
        title, table = _SECTIONS[name]
        measured = environment_line(result["environment"])
        if "num_clips" in result:
            measured += (
                f" {result['num_clips']} held-out clips; the first {result['num_layers_tapped']} "
                "layers tapped unless another number is given."
            )
        lines = [f"## {title}", "", f"`{result['command']}`", "", measured, ""]
        if name in DRAWERS:
            lines += [f"![{title}](pruning-{name}.svg)", ""]
        parts.append("\n".join([*lines, table(result)]))
    return "\n\n".join(parts)


def criteria(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the figures say about the goals, a line each."""
    rows = {row["label"]: row for row in results["ratio"]["rows"]}
    own = rows["holistic 0.9"]
    others = {
        label: row for label, row in rows.items() if row["ratio"] == 0.9 and label != "holistic 0.9"
    }
    best = max(others, key=lambda label: others[label]["agreement"]["mean"])
    behind = others[best]["minus holistic 0.9"]
    is_level = behind["mean"] <= 0 or behind["low"] <= 0 <= behind["high"]
    half = 50 * (own["agreement"]["high"] - own["agreement"]["low"])
    lines = [
        f"- At ratio 0.9 `holistic` agrees on {tables.percent(own['agreement'])} % of the tokens; "
        f"the best other strategy is `{others[best]['strategy']}` with "
        f"{tables.percent(others[best]['agreement'])} % (paired difference "
        f"{-100 * behind['mean']:+.2f}, interval {-100 * behind['high']:+.2f} to "
        f"{-100 * behind['low']:+.2f}). Goal, at least as often (no difference against it that "
        "the interval tells from 0) with a half-width of at most 1 point: "
        f"{_verdict(is_level and half <= 1)}.",
        f"- `none` agrees on {tables.percent(rows['none']['agreement'])} %, so pruning 90 % costs "
        f"{-100 * own['minus none']['mean']:.2f} points. Goal, at most 2: "
        f"{_verdict(own['minus none']['mean'] >= -0.02)}.",
    ]
    if "first-token" in results:
        rows = {row["system"]: row for row in results["first-token"]["rows"]}
        row = rows["adaptive, holistic 0.9"]
        ready, ttft = row["first_block_ready"], row["ttft_ratio"]
        lines += [
            f"- The draft's first block is there when the target's prefill ends in {ready:.1%} of "
            f"{row['num_requests']} requests. Goal, 95 %: {_verdict(ready >= 0.95)}.",
            f"- Time to first token is {tables.figure(ttft, '.4f')} times the target-only one. "
            f"Goal, at most 1.03: {_verdict(ttft['mean'] <= 1.03)}.",
        ]
    return lines


def _verdict(is_met: bool) -> str:
    return "**met**" if is_met else "**not met**"


if __name__ == "__main__":
    main()
