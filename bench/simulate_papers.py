"""Predicts serial, vpsd and adaptive for the papers' pairs: ``python -m bench.simulate_papers``.

Step times come from bytes over bandwidth (hippo.simulation.hardware), since none are published in
what was at hand; nothing here is measured. Writes bench/out/papers.json and a picture a pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.environment import ROOT
from hippo.benchmark.tables import progress_bar
from hippo.cli.simulate_show import row_figures
from hippo.simulation.hardware import GPUS, Placement
from hippo.simulation.machine import Machine
from hippo.simulation.pairs import PAIRS, Pair, pair_machine
from hippo.simulation.plots import draw_sweeps
from hippo.simulation.replay import compare, parse_policies
from hippo.simulation.sweeps import QUANTITIES, sweep
from hippo.simulation.traces import Trace, agreement_of_run_length, drawn_traces

POLICIES = "serial:best,vpsd:best,adaptive"
RUN_LENGTHS = (4.0, 8.0, 12.0)
PLOTTED = ("qwen-7b-72b", "qwen-7b-32b", "llava-0.5b-7b")
_RATE = agreement_of_run_length(8.0)  # where a sweep is of something else


def main(argv: Sequence[str] | None = None) -> None:
    """Predicts, draws and writes JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate_papers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--num-traces", type=int, default=6, help="answers of 256 tokens a point")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/out/papers.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the pictures")
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    console = Console()
    with progress_bar(console) as progress:
        for name, pair in progress.track(PAIRS.items(), description="pairs"):
            machine = machine_of(pair, args.gpu)
            traces_at = partial(_traces, pair, args.num_traces)
            result = predict(pair, machine, traces_at)
            if name in PLOTTED:
                sweeps = [
                    sweep(
                        quantity,
                        machine,
                        policies=parse_policies(POLICIES),
                        traces_at=traces_at,
                        acceptance=_RATE,
                    )
                    for quantity in QUANTITIES
                ]
                goal = args.docs / f"predicted-{name}.svg"
                draw_sweeps(sweeps, goal, title=f"predicted, not measured: {machine.name}")
                result["sweeps"] = [
                    {
                        "quantity": each.quantity,
                        "points": [dataclasses.asdict(point) for point in each.points],
                    }
                    for each in sweeps
                ]
            results.append(result)
    document = {
        "command": f"python -m bench.simulate_papers --gpu {args.gpu}",
        "pairs": results,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {args.out}")


def machine_of(pair: Pair, gpu: str) -> Machine:
    """The pair on its smallest number of GPUs, the draft on one more."""
    target = Placement(gpu=GPUS[gpu], num_gpus=pair.num_target_gpus)
    return pair_machine(pair, target=target, draft=Placement(gpu=GPUS[gpu]))


def predict(pair: Pair, machine: Machine, traces_at: Any) -> dict[str, Any]:
    """A row a policy at each run length."""
    rows = []
    for run_length in RUN_LENGTHS:
        traces = traces_at(agreement_of_run_length(run_length))
        for row in compare(parse_policies(POLICIES), traces, machine):
            rows.append({"run_length_drawn": run_length, **row_figures(row)})
    context = pair.num_prompt_tokens + 128
    return {
        "pair": pair.name,
        "title": pair.title,
        "machine": machine.as_dict(),
        "target_step_ms": machine.target.ms(1, context),
        "draft_step_ms": machine.draft.ms(1, pair.num_draft_tokens(0.9) + 128),
        "rows": rows,
    }


def _traces(pair: Pair, num_traces: int, rate: float) -> list[Trace]:
    return drawn_traces(
        agreement=rate,
        num_traces=num_traces,
        num_tokens=256,
        burstiness=0.5,
        num_prompt_tokens=pair.num_prompt_tokens,
        num_draft_prompt_tokens=pair.num_draft_tokens(0.9),
    )


if __name__ == "__main__":
    main()
