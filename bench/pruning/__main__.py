"""Experiments on visual token pruning, on held-out clips of the bundled pair's world.

Each experiment writes bench/out/pruning/NAME.json; `python -m bench.page` puts them into
docs/results.md. `ratio` and `ablation` run only the draft along the target's outputs, which
`traces` stores under bench/out/pruning; an interrupted run continues.

    traces      the target's greedy outputs, visual features and attention of each layer
    ratio       agreement by strategy and ratio
    ablation    holistic with one option changed at a time
    confirm     strategies on other clips, on which no default was chosen (traces them first)
    services    speedup and acceptance rate by strategy and ratio, through the services

    python -m bench.pruning traces --clips 200
    python -m bench.pruning ratio --clips 50 --records
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.environment import describe_environment
from bench.options import parser_of
from bench.pruning import experiments, pair
from bench.pruning.agreement import AgreementCache, DraftRunner
from bench.pruning.choices import Choice
from bench.pruning.samples import CONFIRM_SEED
from bench.pruning.services import measure_strategies
from bench.pruning.teacher import ChoiceOutcome, run_choices
from bench.pruning.traces import CACHE, TraceStore, stored_traces, trace_clips
from hippo.cli.stack import BUNDLED_PAIR
from hippo.models.base import VideoLanguageModel
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from hippo.pruning.select import default_score_layers


@dataclass
class ExperimentRun:
    """One run of an experiment: the pair, the traces, and the output folder."""

    args: argparse.Namespace
    command: str
    console: Console

    @cached_property
    def target(self) -> VideoLanguageModel:
        """The target in float32."""
        return load_model(LoadPlan(str(self.args.target_model), dtype="float32"))

    @cached_property
    def draft(self) -> VideoLanguageModel:
        """The draft in float32."""
        return load_model(LoadPlan(str(self.args.draft_model), dtype="float32"))

    @cached_property
    def store(self) -> TraceStore:
        """The traces of this pair."""
        return TraceStore(self.args.out / f"traces-{self.pair_name}")

    @cached_property
    def runner(self) -> DraftRunner:
        """The draft with its cache of agreement."""
        cache = AgreementCache(self.args.out / f"agreement-{self.pair_name}.jsonl")
        return DraftRunner(self.draft, cache)

    @cached_property
    def pair_name(self) -> str:
        """A name of the pair for file names."""
        models = (self.args.target_model, self.args.draft_model)
        return "-".join(pair.fingerprint(model) for model in models)

    @property
    def num_layers(self) -> int:
        """Layers tapped by default: --layers, or the target service's default."""
        return int(self.args.layers or default_score_layers(self.most_layers))

    @property
    def most_layers(self) -> int:
        """The number of layers of the target."""
        return pair.num_layers(self.args.target_model)

    def judge_choices(self, name: str, choices: Mapping[str, Choice]) -> dict[str, ChoiceOutcome]:
        """Runs the draft with every choice on the traced clips; returns the outcome by label."""
        return run_choices(
            stored_traces(self.console, self.store, num_clips=self.args.clips, title=name),
            self.runner,
            choices,
            records=self.args.out / f"{name}-records.jsonl" if self.args.records else None,
        )

    def write_result(self, name: str, result: Mapping[str, Any]) -> None:
        """Writes an experiment's JSON and prints its rows."""
        document = {
            "experiment": name,
            "command": self.command,
            "environment": describe_environment(),
            "num_clips": self.args.clips,
            "num_layers_tapped": self.num_layers,
            **result,
        }
        path = self.args.out / f"{name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        self.console.print(f"written to {path}")


def run_traces(run: ExperimentRun) -> None:
    """Traces the clips that have none yet."""
    trace_clips(run.console, run.store, run.target, run.draft, num_clips=run.args.clips)


def run_ratio(run: ExperimentRun) -> None:
    """Measures every strategy at every ratio."""
    outcomes = run.judge_choices("ratio", experiments.ratio_choices(run.num_layers))
    rows = experiments.agreement_rows(outcomes, references=["none", "holistic 0.9"])
    run.write_result("ratio", {"rows": rows})


def run_ablation(run: ExperimentRun) -> None:
    """Measures holistic with one option changed at a time."""
    choices = experiments.ablation_choices(run.num_layers, run.args.ratio, run.most_layers)
    outcomes = run.judge_choices("ablation", choices)
    rows = experiments.agreement_rows(outcomes, references=["none", experiments.BASE])
    run.write_result("ablation", {"rows": rows, "ratio": run.args.ratio})


def run_confirm(run: ExperimentRun) -> None:
    """Measures the strategies on the clips of another seed."""
    name, count = "confirm", run.args.clips
    store = TraceStore(run.args.out / f"traces-{name}-{run.pair_name}")
    trace_clips(run.console, store, run.target, run.draft, num_clips=count, seed=CONFIRM_SEED)
    cache = AgreementCache(run.args.out / f"agreement-{name}-{run.pair_name}.jsonl")
    outcomes = run_choices(
        stored_traces(run.console, store, num_clips=count, title=name, seed=CONFIRM_SEED),
        DraftRunner(run.draft, cache),
        experiments.confirmation_choices(run.num_layers),
    )
    rows = experiments.agreement_rows(outcomes, references=["none", "holistic 0.9"])
    run.write_result(name, {"rows": rows})


def run_services(run: ExperimentRun) -> None:
    """Measures the strategies through the services."""
    run.write_result("services", {"rows": measure_strategies(run.console, run.args.clips)})


EXPERIMENTS: Mapping[str, Callable[[ExperimentRun], None]] = {
    "traces": run_traces,
    "ratio": run_ratio,
    "ablation": run_ablation,
    "confirm": run_confirm,
    "services": run_services,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs an experiment."""
    parser = parser_of("bench.pruning", __doc__)
    add = parser.add_argument
    add("experiment", choices=list(EXPERIMENTS))
    add("--clips", type=int, help="held-out clips (default: 200; services 10)")
    add("--layers", type=int, help="first layers tapped (default: as the target service)")
    add("--ratio", type=float, default=0.9, help="share pruned in the ablation")
    add("--records", action="store_true", help="also write kept indices and agreement by sample")
    add("--target-model", type=Path, default=BUNDLED_PAIR / "target")
    add("--draft-model", type=Path, default=BUNDLED_PAIR / "draft")
    add("--out", type=Path, default=CACHE)
    args = parser.parse_args(argv)
    if args.clips is None:
        args.clips = 10 if args.experiment == "services" else 200
    if args.clips < 1:
        parser.error("--clips must be at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # services are stopped
    torch.set_num_threads(1)
    given = argv if argv is not None else sys.argv[1:]
    command = " ".join(["python -m bench.pruning", *given])
    EXPERIMENTS[args.experiment](ExperimentRun(args, command, Console()))


if __name__ == "__main__":
    main()
