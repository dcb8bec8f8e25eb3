"""Experiments on visual token pruning: by default the bundled pair, on held-out clips of its world.

Each experiment writes NAME.json; `python -m bench.pages.results` puts the bundled pair's into
docs/pruning.md. All but `services` run only the draft along the target's outputs, which are stored
beside the results; an interrupted run continues. Their tokens a pass and decode speedups are
replays of the draft's agreement by the simulator of `hippo simulate`, under adaptive and without
transport, with step times that the command measures.

    traces      the target's greedy outputs, visual features and attention of each layer
    ratio       agreement and accepted tokens by strategy and ratio, the draft's time by ratio
    ablation    holistic with one option changed at a time, uv, and the published choices
    bias        the share of the highest scores at the frames' edges and the sequence's ends
    frames      agreement and prompt length by number of frames
    confirm     strategies on other clips of the world, on which no default was chosen
    services    measured speedup, times and accepted tokens by strategy and ratio, of options and
                presets, through the services

    python -m bench.pruning ratio --clips 50 --records

Any pair of supported checkpoints and any videos: name the models and a file of questions in the
form of `hippo bench --questions` (docs/operations.md). Content words are known only of the world.

    python -m bench.pruning bias --questions questions.jsonl --dtype bfloat16 \\
        --target-model Qwen/Qwen2.5-VL-7B-Instruct --target-device cuda:0 \\
        --draft-model Qwen/Qwen2.5-VL-3B-Instruct --draft-device cuda:1
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.answers.runs import bundled_pair
from bench.base.environment import describe_environment
from bench.base.options import integers, parser_of
from bench.base.tables import wide_console, wide_table
from bench.drafts.samples import (
    CONFIRM_SEED,
    HeldOutWorld,
    QuestionsFile,
    SampleClip,
    SampleSource,
)
from bench.drafts.traces import (
    CACHE,
    ClipTrace,
    TraceStore,
    stored_traces,
    trace_clip,
    trace_missing,
)
from bench.pruning import experiments, pair
from bench.pruning.agreement import AgreementCache, DraftRunner
from bench.pruning.bias import bias_choices, bias_rows
from bench.pruning.choices import Choice
from bench.pruning.experiments import Layers
from bench.pruning.services import measure_services
from bench.pruning.speed import MeasuredTimes, measure_steps
from bench.pruning.tables import table_of
from bench.pruning.teacher import run_choices
from hippo.catalog.shapes import shape_of
from hippo.cli.stack import BUNDLED_PAIR
from hippo.errors import HippoError, InvalidRequestError
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.checkpoint import Checkpoint, find_checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.pruning.select import default_score_layers

_PAIR_FLAGS = ("target_model", "draft_model", "target_device", "draft_device")


@dataclass
class ExperimentRun:
    """One run of an experiment: the pair, the source of samples, and the output folder."""

    args: argparse.Namespace
    command: str
    console: Console
    source: SampleSource

    @cached_property
    def checkpoints(self) -> tuple[Checkpoint, Checkpoint]:
        """Target and draft. Raises ModelLoadError for one that is missing or damaged."""
        names = (self.args.target_model, self.args.draft_model)
        target, draft = (find_checkpoint(name, progress=lambda *_: None) for name in names)
        return target, draft

    @cached_property
    def target(self) -> VideoLanguageModel:
        """The target."""
        return self._load(self.args.target_model, self.args.target_device)

    @cached_property
    def draft(self) -> VideoLanguageModel:
        """The draft."""
        return self._load(self.args.draft_model, self.args.draft_device)

    @cached_property
    def layers(self) -> Layers:
        """Layers tapped: --layers or the target service's default, and at most the target's."""
        target = self.checkpoints[0]
        most = shape_of(target.name, target.config).num_layers
        return Layers(int(self.args.layers or default_score_layers(most)), most)

    @cached_property
    def clips(self) -> list[SampleClip]:
        """The clips that are asked about."""
        return self.source.clips(self.args.clips)

    def traces(self, title: str, *, num_frames: int = 0) -> Iterator[ClipTrace]:
        """Traces the clips that have no trace, then yields all; alignment only with the model's
        number of frames."""
        aligned = [] if num_frames else self.layers.aligned
        tapped = "-".join(map(str, aligned))
        store = TraceStore(self.args.out / f"traces-{self._key(num_frames)}-aligned{tapped}")

        def trace(clip: SampleClip) -> ClipTrace:
            return trace_clip(
                self.target,
                self.draft,
                clip,
                self.source,
                num_frames=num_frames,
                aligned_layers=aligned,
            )

        trace_missing(self.console, store, self.clips, trace)
        device = self.args.draft_device
        return stored_traces(self.console, store, self.clips, device=device, title=title)

    def judge_choices(
        self,
        name: str,
        choices: Mapping[str, Choice],
        *references: str,
        num_frames: int = 0,
    ) -> tuple[list[dict[str, Any]], MeasuredTimes]:
        """Runs the draft with every choice. Returns a row for each (experiments.agreement_rows),
        and times of both models on the first clip, for the draft also pruned."""
        traces = self.traces(name, num_frames=num_frames)
        cache = AgreementCache(self.args.out / f"agreement-{self._key(num_frames)}.jsonl")
        file = self.args.out / f"{name}{num_frames or ''}-records.jsonl"
        records = file if self.args.records else None
        outcomes = run_choices(traces, DraftRunner(self.draft, cache), choices, records=records)
        first = next(self.traces("step times", num_frames=num_frames))
        times = measure_steps(self.target, self.draft, first)
        references = ("none", *references)
        rows = experiments.agreement_rows(outcomes, references=references, machine=times.machine)
        return rows, times

    def write_result(self, name: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> None:
        """Writes an experiment's JSON and prints its rows."""
        target, draft = self.checkpoints
        document = {
            "experiment": name,
            "command": self.command,
            "environment": describe_environment(),
            "target": target.name,
            "draft": draft.name,
            "devices": [self.args.target_device, self.args.draft_device],
            "dtype": self.args.dtype,
            "source": self.source.name,
            "num_clips": len(self.clips),
            "num_layers_tapped": self.layers.default,
            "rows": rows,
            **facts,
        }
        path = self.args.out / f"{name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if name != "services":  # has printed its table
            self.console.print(wide_table(*table_of(document)))
        self.console.print(f"written to {path}")

    def _load(self, model: str, device: str) -> VideoLanguageModel:
        limit = self.args.max_context_length
        plan = LoadPlan(model, device=device, dtype=self.args.dtype, max_context_length=limit)
        return load_model(plan)

    def _key(self, num_frames: int) -> str:
        """A name for files about the pair, the samples and the number of frames."""
        parts = [*map(pair.fingerprint, self.checkpoints), self.args.dtype, self.source.name]
        for number, name in ((self.args.max_context_length, "context"), (num_frames, "frames")):
            parts += [f"{name}{number}"] if number else []
        return "-".join(parts)


def run_traces(run: ExperimentRun) -> None:
    """Traces the clips that have none yet."""
    run.traces("traces")


def run_ratio(run: ExperimentRun) -> None:
    """Measures every strategy at every ratio."""
    choices = experiments.ratio_choices(run.layers)
    rows, times = run.judge_choices("ratio", choices, "holistic 0.9")
    run.write_result("ratio", rows, step_times=times.as_dict())


def run_ablation(run: ExperimentRun) -> None:
    """Measures holistic with one option changed at a time."""
    choices = experiments.ablation_choices(run.layers, run.args.ratio)
    rows, times = run.judge_choices("ablation", choices, experiments.BASE)
    run.write_result("ablation", rows, ratio=run.args.ratio, step_times=times.as_dict())


def run_bias(run: ExperimentRun) -> None:
    """Measures where the tokens with the highest scores lie."""
    rows, grids = bias_rows(run.traces("bias"), bias_choices(run.layers))
    run.write_result("bias", rows, grids=grids)


def run_frames(run: ExperimentRun) -> None:
    """Measures holistic and no pruning at each number of frames asked for."""
    choices = experiments.frames_choices(run.layers)
    rows = [
        {**row, "label": f"{number} frames, {row['label']}"}
        for number in run.args.frames
        for row in run.judge_choices("frames", choices, num_frames=number)[0]
    ]
    run.write_result("frames", rows)


def run_confirm(run: ExperimentRun) -> None:
    """Measures the strategies on the clips of another seed."""
    if not isinstance(run.source, HeldOutWorld):
        raise InvalidRequestError("confirm has clips of its own: leave --questions out")
    run.source = HeldOutWorld(CONFIRM_SEED)
    choices = experiments.confirmation_choices(run.layers)
    rows, times = run.judge_choices("confirm", choices, "holistic 0.9")
    run.write_result("confirm", rows, step_times=times.as_dict())


def run_services(run: ExperimentRun) -> None:
    """Measures the strategies and policies through the services."""
    args = run.args
    options = bundled_pair(
        args.dtype,
        draft_dtype=args.dtype,
        max_context_length=args.max_context_length,
        **{name: getattr(args, name) for name in _PAIR_FLAGS},
    )
    rows = measure_services(run.console, options, run.clips, ratio=args.ratio)
    run.write_result("services", rows)


EXPERIMENTS: Mapping[str, Callable[[ExperimentRun], None]] = {
    "traces": run_traces,
    "ratio": run_ratio,
    "ablation": run_ablation,
    "bias": run_bias,
    "frames": run_frames,
    "confirm": run_confirm,
    "services": run_services,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs an experiment. Raises SystemExit with a sentence for what cannot be run."""
    parser = parser_of("bench.pruning", __doc__)
    add = parser.add_argument
    add("experiment", choices=list(EXPERIMENTS))
    add("--clips", type=int, help="clips (default: 200, or all of --questions; services 10)")
    add("--layers", type=int, help="first layers tapped (default: as the target service)")
    add("--ratio", type=float, default=0.9, help="share pruned in ablation, and by options")
    add("--frames", type=integers, default=[4, 8, 16, 32], help="for frames (default: 4,8,16,32)")
    add("--records", action="store_true", help="also write kept indices and agreement by sample")
    for model in ("target", "draft"):
        default = str(BUNDLED_PAIR / model)
        add(f"--{model}-model", default=default, help="folder or hub name (default: bundled)")
        add(f"--{model}-device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add("--dtype", default="float32", help="of both models (default: float32)")
    add("--max-context-length", type=int, help="of both models (default: as the memory allows)")
    add("--num-threads", type=int, default=1, help="of the models on a CPU (default: 1)")
    add("--questions", type=Path, help="a file as for `hippo bench` (default: the bundled world)")
    add("--videos", help="the folder of the questions' videos (default: beside the file)")
    add("--out", type=Path, help="folder (default: bench/out/pruning, own/ in it with own flags)")
    args = parser.parse_args(argv)
    if args.clips is None and args.experiment == "services":
        args.clips = 10
    if args.clips is not None and args.clips < 1:
        parser.error("--clips must be at least 1")
    if args.out is None:  # the page shows the figures of the bundled pair
        names = (*_PAIR_FLAGS, "dtype", "questions", "max_context_length")
        is_own = any(getattr(args, name) != parser.get_default(name) for name in names)
        args.out = CACHE / "own" if is_own else CACHE
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # services are stopped
    torch.set_num_threads(args.num_threads)
    given = argv if argv is not None else sys.argv[1:]
    command = " ".join(["python -m bench.pruning", *given])
    try:
        source = QuestionsFile(args.questions, args.videos) if args.questions else HeldOutWorld()
        EXPERIMENTS[args.experiment](ExperimentRun(args, command, wide_console(), source))
    except HippoError as error:
        raise SystemExit(f"bench.pruning: {error}") from None


if __name__ == "__main__":
    main()
