"""Experiments on visual token pruning: by default the bundled pair, on held-out clips of its world.

Each experiment writes NAME.json; `python -m bench.pages.results` puts the bundled pair's into
docs/pruning.md. All but `services` run only the draft along the target's outputs. Their tokens a
pass and decode speedups are replays of the draft's agreement by the simulator of `hippo simulate`,
under adaptive and without transport, with step times that the command measures.

    ratio       agreement and accepted tokens by strategy and ratio, the draft's time by ratio
    ablation    holistic with one option changed at a time, uv, and the published choices
    bias        the share of the highest scores at the frames' edges and the sequence's ends
    frames      agreement and prompt length by number of frames
    confirm     strategies on other clips of the world, on which no default was chosen
    services    measured speedup, times and accepted tokens by strategy and ratio, of options and
                presets, through the services
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.answers.runs import bundled_pair
from bench.base.environment import ROOT
from bench.base.options import integers, new_result, parser_of, write_result
from bench.base.tables import wide_console
from bench.pruning import choices as choose
from bench.pruning.bias import bias_choices, bias_rows
from bench.pruning.choices import Choice, Layers
from bench.pruning.judge import agreement_rows, run_choices
from bench.pruning.services import measure_services
from bench.pruning.speed import MeasuredTimes, measure_steps
from bench.pruning.tables import markdown_tables
from bench.pruning.traces import CONFIRM_SEED, SEED, ClipTrace, clip_samples, trace_clip
from hippo.cli.stack import BUNDLED_PAIR
from hippo.client.tables import tracked
from hippo.errors import HippoError
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.pruning.select import default_score_layers

EXPERIMENTS = ("ratio", "ablation", "bias", "frames", "confirm", "services")
_OUT = ROOT / "bench/out/pruning"
_PAIR_FLAGS = ("target_model", "draft_model", "target_device", "draft_device")


@dataclass
class ExperimentRun:
    """One run of an experiment: its options, and where its tables go."""

    args: argparse.Namespace
    console: Console

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
        """Layers tapped: the target service's default, and at most the target's."""
        most = self.target.num_layers
        return Layers(default_score_layers(most), most)

    @property
    def seed(self) -> int:
        """The seed of the clips."""
        return CONFIRM_SEED if self.args.experiment == "confirm" else SEED

    def traces(self, *, num_frames: int = 0) -> Iterator[ClipTrace]:
        """Yields the clips' traces with a progress bar; alignment only with the model's number of
        frames."""
        aligned = [] if num_frames else self.layers.aligned
        numbers = range(self.args.clips)
        for number in tracked(numbers, self.console, title="clips", total=len(numbers)):
            samples = clip_samples(number, seed=self.seed)
            yield trace_clip(
                self.target, self.draft, samples, num_frames=num_frames, aligned_layers=aligned
            )

    def judge_choices(
        self, choices: Mapping[str, Choice], *references: str, num_frames: int = 0
    ) -> tuple[list[dict[str, Any]], MeasuredTimes]:
        """Runs the draft with every choice. Returns a row for each (judge.agreement_rows), and
        times of both models on the first clip, for the draft also pruned."""
        times: list[MeasuredTimes] = []

        def traces() -> Iterator[ClipTrace]:
            for trace in self.traces(num_frames=num_frames):
                times.extend([] if times else [measure_steps(self.target, self.draft, trace)])
                yield trace

        outcomes = run_choices(traces(), self.draft, choices)
        references = ("none", *references)
        rows = agreement_rows(outcomes, references=references, machine=times[0].machine)
        return rows, times[0]

    def result(self) -> dict[str, Any]:
        """Runs the experiment; returns its rows, and facts about them."""
        layers, ratio = self.layers, self.args.ratio
        if self.args.experiment == "bias":
            rows, grids = bias_rows(self.traces(), bias_choices(layers))
            return {"rows": rows, "grids": grids}
        if self.args.experiment == "frames":
            found = [
                {**row, "label": f"{number} frames, {row['label']}"}
                for number in self.args.frames
                for row in self.judge_choices(choose.frames_choices(layers), num_frames=number)[0]
            ]
            return {"rows": found}
        choices, reference = {
            "ratio": (choose.ratio_choices(layers), "holistic 0.9"),
            "confirm": (choose.confirmation_choices(layers), "holistic 0.9"),
            "ablation": (choose.ablation_choices(layers, ratio), choose.BASE),
        }[self.args.experiment]
        rows, times = self.judge_choices(choices, reference)
        return {"rows": rows, "ratio": ratio, "step_times": times.as_dict()}

    def services_result(self) -> dict[str, Any]:
        """Measures the strategies, options and presets through the services."""
        args = self.args
        options = bundled_pair(
            args.dtype,
            draft_dtype=args.dtype,
            max_context_length=args.max_context_length,
            **{name: getattr(args, name) for name in _PAIR_FLAGS},
        )
        clips = [clip_samples(number, seed=self.seed) for number in range(args.clips)]
        return {"rows": measure_services(self.console, options, clips, ratio=args.ratio)}

    def _load(self, model: str, device: str) -> VideoLanguageModel:
        limit = self.args.max_context_length
        plan = LoadPlan(model, device=device, dtype=self.args.dtype, max_context_length=limit)
        return load_model(plan)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs an experiment, prints its rows and writes JSON. Raises SystemExit with a sentence for
    what cannot be run."""
    args = _parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # services are stopped
    torch.set_num_threads(args.num_threads)
    is_served = args.experiment == "services"
    run = ExperimentRun(args, wide_console())
    try:
        found = run.services_result() if is_served else run.result()
    except HippoError as error:
        raise SystemExit(f"bench.pruning: {error}") from None
    result = new_result(
        "bench.pruning",
        argv,
        experiment=args.experiment,
        target=Path(args.target_model).name,
        draft=Path(args.draft_model).name,
        devices=[args.target_device, args.draft_device],
        dtype=args.dtype,
        num_clips=args.clips,
        **found,
    )
    path = args.out / f"{args.experiment}.json"
    write_result(path, result)
    if not is_served:  # has printed its table
        tables = "\n\n".join(markdown_tables(args.experiment, result))
        run.console.print(tables, markup=False, highlight=False, soft_wrap=True)
    run.console.print(f"written to {path}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.pruning", __doc__)
    add = parser.add_argument
    add("experiment", choices=EXPERIMENTS)
    add("--clips", type=int, help="held-out clips (default: 200; services 10)")
    add("--ratio", type=float, default=0.9, help="share pruned in ablation, and by options")
    add("--frames", type=integers, default=[4, 8, 16, 32], help="for frames (default: 4,8,16,32)")
    for model in ("target", "draft"):
        default = str(BUNDLED_PAIR / model)
        add(f"--{model}-model", default=default, help="folder or hub name (default: bundled)")
        add(f"--{model}-device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add("--dtype", default="float32", help="of both models (default: float32)")
    add("--max-context-length", type=int, help="of both models (default: as the memory allows)")
    add("--num-threads", type=int, default=1, help="of the models on a CPU (default: 1)")
    add("--out", type=Path, help="folder (default: bench/out/pruning, own/ in it with own flags)")
    args = parser.parse_args(argv)
    if args.clips is None:
        args.clips = 10 if args.experiment == "services" else 200
    if args.clips < 1:
        parser.error("--clips must be at least 1")
    if args.out is None:  # the page shows the figures of the bundled pair
        names = (*_PAIR_FLAGS, "dtype", "max_context_length")
        is_own = any(getattr(args, name) != parser.get_default(name) for name in names)
        args.out = _OUT / "own" if is_own else _OUT
    return args


if __name__ == "__main__":
    main()
