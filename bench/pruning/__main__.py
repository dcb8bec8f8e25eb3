"""Evidence for semantic-aware token preservation, on held-out clips of the bundled pair's world.

Each experiment writes bench/out/pruning/NAME.json; `python -m bench.page` puts them into
docs/results.md. All but `services` run the draft alone, along what the target said (the
traces are kept under bench/out/pruning; a run that is broken off goes on where it stopped).

    traces      the target's greedy outputs, visual features and attention, layer by layer
    ratio       agreement by strategy and ratio
    ablation    holistic with one thing changed at a time
    confirm     strategies again, on clips on which no default was chosen (traces them first)
    services    speedup and acceptance by strategy and ratio, through the real services

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
from bench.pruning import experiments, pair
from bench.pruning.agreement import AgreementCache, DraftRunner
from bench.pruning.choices import Choice
from bench.pruning.samples import CONFIRM_SEED
from bench.pruning.services import measure_strategies
from bench.pruning.teacher import Outcome, run_choices
from bench.pruning.traces import CACHE, TraceStore, stored_traces, trace_clips
from hippo.cli.stack import BUNDLED_PAIR
from hippo.models.base import VideoLanguageModel
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from hippo.pruning.select import default_score_layers


@dataclass
class Bench:
    """What the experiments share: the pair, the traces and where results go."""

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
        """The draft with what it has been seen to say."""
        cache = AgreementCache(self.args.out / f"agreement-{self.pair_name}.jsonl")
        return DraftRunner(self.draft, cache)

    @cached_property
    def pair_name(self) -> str:
        """Tells one pair's files from another's."""
        models = (self.args.target_model, self.args.draft_model)
        return "-".join(pair.fingerprint(model) for model in models)

    @property
    def num_layers(self) -> int:
        """Layers tapped unless an experiment varies them: the target service's default."""
        return int(self.args.layers or default_score_layers(self.most_layers))

    @property
    def most_layers(self) -> int:
        """Layers of the target."""
        return pair.num_layers(self.args.target_model)

    def run(
        self,
        name: str,
        choices: Mapping[str, Choice],
    ) -> dict[str, Outcome]:
        """Judges the choices on the traced clips."""
        return run_choices(
            stored_traces(self.console, self.store, num_clips=self.args.clips, title=name),
            self.runner,
            choices,
            records=self.args.out / f"{name}-records.jsonl" if self.args.records else None,
        )

    def write(self, name: str, result: Mapping[str, Any]) -> None:
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


def run_traces(bench: Bench) -> None:
    """Traces the clips that have none yet."""
    trace_clips(bench.console, bench.store, bench.target, bench.draft, num_clips=bench.args.clips)


def run_ratio(bench: Bench) -> None:
    """Every strategy at every ratio."""
    outcomes = bench.run("ratio", experiments.ratio_choices(bench.num_layers))
    rows = experiments.agreement_rows(outcomes, references=["none", "holistic 0.9"])
    bench.write("ratio", {"rows": rows})


def run_ablation(bench: Bench) -> None:
    """Holistic with one thing changed at a time."""
    choices = experiments.ablation_choices(bench.num_layers, bench.args.ratio, bench.most_layers)
    outcomes = bench.run("ablation", choices)
    rows = experiments.agreement_rows(outcomes, references=["none", experiments.BASE])
    bench.write("ablation", {"rows": rows, "ratio": bench.args.ratio})


def run_confirm(bench: Bench) -> None:
    """Strategies again, on the clips of another seed."""
    name, count = "confirm", bench.args.clips
    store = TraceStore(bench.args.out / f"traces-{name}-{bench.pair_name}")
    trace_clips(bench.console, store, bench.target, bench.draft, num_clips=count, seed=CONFIRM_SEED)
    cache = AgreementCache(bench.args.out / f"agreement-{name}-{bench.pair_name}.jsonl")
    outcomes = run_choices(
        stored_traces(bench.console, store, num_clips=count, title=name, seed=CONFIRM_SEED),
        DraftRunner(bench.draft, cache),
        experiments.confirmation_choices(bench.num_layers),
    )
    rows = experiments.agreement_rows(outcomes, references=["none", "holistic 0.9"])
    bench.write(name, {"rows": rows})


def run_services(bench: Bench) -> None:
    """Strategies through the services."""
    bench.write("services", {"rows": measure_strategies(bench.console, bench.args.clips)})


EXPERIMENTS: Mapping[str, Callable[[Bench], None]] = {
    "traces": run_traces,
    "ratio": run_ratio,
    "ablation": run_ablation,
    "confirm": run_confirm,
    "services": run_services,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs an experiment."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pruning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    EXPERIMENTS[args.experiment](Bench(args, command, Console()))


if __name__ == "__main__":
    main()
