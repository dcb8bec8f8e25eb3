"""Writes figures into docs/performance-simulator.md: ``python -m bench.simulator_page``.

Reads what `python -m bench.simulate_fit` and `python -m bench.simulate_papers` wrote; nothing
between the page's markers is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.environment import ROOT
from bench.publish import environment_line
from bench.sections import replace_section
from hippo.simulation.machine import StepTime, machine_from

PAGE = ROOT / "docs/performance-simulator.md"
_GOAL = 5.0


def main(argv: Sequence[str] | None = None) -> None:
    """Rewrites the page's two sections."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulator_page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = ROOT / "bench/out"
    parser.add_argument("--fit", type=Path, nargs="*", default=[out / "fit.json"])
    parser.add_argument("--papers", type=Path, default=out / "papers.json")
    args = parser.parse_args(argv)
    for name, paths in (("fit", args.fit), ("papers", [args.papers])):
        missing = [str(path) for path in paths if not path.exists()]
        if missing:
            raise SystemExit(f"there is no {missing[0]}: run python -m bench.simulate_{name} first")
    fits = [json.loads(path.read_text(encoding="utf-8")) for path in args.fit]
    replace_section(PAGE, "fit", "\n\n".join(fit_section(fit) for fit in fits))
    papers = json.loads(args.papers.read_text(encoding="utf-8"))
    replace_section(PAGE, "papers", papers_section(papers))


def fit_section(fit: Mapping[str, Any]) -> str:
    """Predicted beside measured, a table a dtype."""
    records = fit["records"]
    lines = [
        f"`{fit['command']}` on what `{records['command']}` measured: "
        + environment_line(records["environment"])
    ]
    for run in fit["runs"]:
        predictions = run["predictions"]
        machine = machine_from(run["machine"], where="fit")
        within = sum(abs(each["error_percent"]) <= _GOAL for each in predictions)
        others = [each for each in predictions if not each["is_learnt"]]
        lines += [
            "",
            f"**{run['kind']} prompts, {run['dtype']}**, learnt from {fit['system']} and its "
            f"baseline on {run['num_learnt']} clips; the other {run['num_held_out']} clips: "
            f"{within} of {len(predictions)} policies within {_GOAL:g} %, the worst "
            f"{_worst(predictions)}; {_of_others(others)}.",
            "",
            "| policy | measured ms/token | noise of a run | predicted | error | ideal "
            "| efficiency |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {each['system']}{' (learnt)' if each['is_learnt'] else ''} "
            f"| {each['measured']:.3f} | {_noise(each['noise_percent'])} | {each['predicted']:.3f} "
            f"| {each['error_percent']:+.1f} % | {each['ideal']:.3f} | {each['efficiency']:.0%} |"
            for each in predictions
        ]
        lines += [
            "",
            f"Fitted, in ms: target {_rows(machine.target)}; draft {_rows(machine.draft)}; "
            f"while the other computes, the target's steps {machine.target_contention:+.0%}, "
            f"the draft's {machine.draft_contention:+.0%}; behind a rest of 16 ms the target's "
            f"{_cold(machine.target)}, the draft's {machine.draft.cold_ms(5):+.2f}; between two "
            f"target steps {machine.target_scheduling_ms:.2f}; a message one way "
            f"{machine.leg_ms:.2f}, of the draft's core {machine.draft_message_ms:.2f}, of the "
            f"target's {machine.target_message_ms:.3f}, in a step "
            f"{machine.target_interruption_ms:.3f} more; a verdict's text and stream, of the "
            f"draft's core {machine.draft_verdict_ms:.2f}, {machine.draft_token_ms:.3f} a token; "
            f"steps of the draft {machine.draft_disturbance:.0%} of such work longer besides; "
            f"between two of them {machine.draft_scheduling_ms:.2f}.",
        ]
    return "\n".join(lines)


def _worst(predictions: Sequence[Mapping[str, Any]]) -> str:
    """The one that is furthest off, and how far."""
    worst = max(predictions, key=lambda each: abs(each["error_percent"]))
    return f"{worst['system']} ({worst['error_percent']:+.1f} %)"


def _of_others(others: Sequence[Mapping[str, Any]]) -> str:
    """The worst of those that were predicted from another policy."""
    if not others:
        return "all were learnt from"
    return f"the worst of the {len(others)} that were not learnt from: {_worst(others)}"


def _noise(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.1f} %"


def _rows(time: StepTime) -> str:
    """A step's time by rows, in milliseconds, nothing cached."""
    return ", ".join(f"{time.ms(rows, 0):.2f} with {rows}" for rows in (1, 2, 8, 16)) + " rows"


def _cold(time: StepTime) -> str:
    """What a step behind a rest takes longer by rows, in milliseconds."""
    return ", ".join(f"{time.cold_ms(rows):+.2f} with {rows}" for rows in (1, 8, 32)) + " rows"


def papers_section(papers: Mapping[str, Any]) -> str:
    """A table of all pairs and the pictures of those that were swept."""
    lines = [
        f"`{papers['command']}`. **Predicted, not measured.**",
        "",
        "| pair | step ms, target / draft | run length drawn | serial × (γ) | vpsd × (γ) "
        "| adaptive × | adaptive end to end × | tokens/forward |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    pictures = []
    for pair in papers["pairs"]:
        by_run: dict[float, list[Mapping[str, Any]]] = {}
        for row in pair["rows"]:
            by_run.setdefault(row["run_length_drawn"], []).append(row)
        for run_length, (serial, vpsd, adaptive) in by_run.items():
            steps = f"{pair['target_step_ms']:.1f} / {pair['draft_step_ms']:.2f}"
            lines.append(
                f"| {pair['title']} | {steps} | {run_length:g} "
                f"| {serial['decode_speedup']:.2f} ({serial['gamma']}) "
                f"| {vpsd['decode_speedup']:.2f} ({vpsd['gamma']}) "
                f"| {adaptive['decode_speedup']:.2f} | {adaptive['end_to_end_speedup']:.2f} "
                f"| {adaptive['mean_tokens_per_forward']:.2f} |"
            )
        if "sweeps" in pair:
            name = f"predicted-{pair['pair']}.svg"
            pictures += ["", f"![{pair['title']}: predicted speedups]({name})"]
    return "\n".join([*lines, *pictures])


if __name__ == "__main__":
    main()
