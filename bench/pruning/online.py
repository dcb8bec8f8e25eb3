"""Through the real services: speedups, acceptance and time to first token."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from bench.clips import Clip
from bench.measure import Record
from bench.pruning import pair
from bench.pruning.first_token import first_token_rows, measure_first_tokens
from bench.pruning.samples import MIN_OBJECTS, SEED
from bench.pruning.statistics import mean_interval
from bench.runs import run_systems, running_stack
from bench.systems import TARGET_ONLY, System
from demo import clips as demo_clips
from demo import texts
from hippo.cli.stack import StackOptions, default_cores

Row = dict[str, Any]

STRATEGIES = ("holistic", "hybrid", "attention", "specvlm", "uniform", "random")
RATIOS = (0.5, 0.75, 0.9, 0.95, 0.98)
NUM_FRAMES = (8, 16, 32, 64, 128)
_CONTEXT = 12288  # 128 frames of 336 x 336 are 9,216 visual tokens
_FIRST_BLOCK = "first_block_after_first_token"


class OnlineBench:
    """The real services, each half of the pair on its own core, this client on the draft's."""

    def __init__(self, console: Console, args: argparse.Namespace) -> None:
        target_core, draft_core = default_cores("cpu", "cpu")
        if draft_core is not None:
            os.sched_setaffinity(0, {draft_core})
        self._console = console
        self._num_clips = args.clips
        self._num_layers = pair.num_layers(args.target_model)
        self._options = StackOptions(
            target_model=str(args.target_model),
            draft_model=str(args.draft_model),
            dtype="float32",
            draft_dtype="float32",  # as in the measurements without services
            target_core=target_core,
            draft_core=draft_core,
            port=0,
            target_args=() if args.layers is None else ("--score-layers", str(args.layers)),
        )

    def strategies(self) -> Iterator[list[Row]]:
        """Every strategy at every ratio under the adaptive policy."""
        with self._clips() as clips, running_stack(self._options) as url:
            yield self._measure(url, clips, strategy_systems(), "strategies")

    def policies(self) -> Iterator[list[Row]]:
        """Policies on holistic at ratio 0.9, serial also without pruning, and the presets."""
        with self._clips() as clips, running_stack(self._options) as url:
            yield self._measure(url, clips, policy_systems(), "policies")

    def overlap(self) -> Iterator[list[Row]]:
        """Early taps against one after the last layer, with which nothing overlaps."""
        systems = [_system("adaptive, holistic 0.9", "holistic", 0.9)]
        with self._clips() as clips:
            for count in tapped_layers(self._num_layers):
                options = replace(self._options, target_args=("--score-layers", str(count)))
                with running_stack(options) as url:
                    title = f"{count} of {self._num_layers} layers tapped"
                    yield self._measure(url, clips, systems, title)

    def frames(self) -> Iterator[list[Row]]:
        """A few systems on clips from which 8 to 128 frames are taken."""
        context = ("--max-context-length", str(_CONTEXT))
        options = replace(
            self._options, target_args=(*self._options.target_args, *context), draft_args=context
        )
        with running_stack(options) as url:
            for count in NUM_FRAMES:
                with self._clips(count) as clips:
                    rows = self._measure(url, clips, frame_systems(), f"{count} frames")
                    yield [{**row, "num_frames": count} for row in rows]

    def first_token(self) -> Iterator[list[Row]]:
        """Time to first token alone."""
        with self._clips() as clips, running_stack(self._options) as url:
            yield first_token_rows(measure_first_tokens(self._console, url, clips))

    @contextmanager
    def _clips(self, num_frames: int | None = None) -> Iterator[list[Clip]]:
        with tempfile.TemporaryDirectory() as folder:
            yield write_long_clips(Path(folder), self._num_clips, num_frames)

    def _measure(
        self, url: str, clips: Sequence[Clip], systems: Sequence[System], group: str
    ) -> list[Row]:
        title = f"{group}, float32, T=0"
        records, run = run_systems(self._console, url, clips, systems, title=title)
        return rows_of(records, run["summary"], group)


EXPERIMENTS: Mapping[str, Callable[[OnlineBench], Iterator[list[Row]]]] = MappingProxyType(
    {
        "strategies": OnlineBench.strategies,
        "policies": OnlineBench.policies,
        "overlap": OnlineBench.overlap,
        "frames": OnlineBench.frames,
        "first-token": OnlineBench.first_token,
    }
)


def strategy_systems() -> list[System]:
    """Every strategy at every ratio under the adaptive policy."""
    chosen = [_system("none", "none", 0.0), _system("blind", "blind", 0.0)]
    for strategy in STRATEGIES:
        chosen += [_system(f"{strategy} {ratio:g}", strategy, ratio) for ratio in RATIOS]
    return chosen


def policy_systems() -> list[System]:
    """Policies on holistic at ratio 0.9, serial also without pruning, and the papers' systems."""
    chosen = [
        System("preset hippo", {"preset": "hippo"}),
        System("preset specvlm", {"preset": "specvlm"}),
    ]
    for policy in ("adaptive", "optimistic", "conservative"):
        chosen.append(_system(f"{policy}, holistic 0.9", "holistic", 0.9, policy=policy))
    for gamma in (5, 10):
        for policy in ("vpsd", "serial"):
            name = f"{policy} γ={gamma}, holistic 0.9"
            chosen.append(_system(name, "holistic", 0.9, policy=policy, gamma=gamma))
        chosen.append(_system(f"serial γ={gamma}, none", "none", 0.0, policy="serial", gamma=gamma))
    return chosen


def frame_systems() -> list[System]:
    """Pruned and not, in parallel and serially."""
    return [
        _system("adaptive, none", "none", 0.0),
        _system("adaptive, holistic 0.9", "holistic", 0.9),
        System("preset hippo", {"preset": "hippo"}),
        System("preset specvlm", {"preset": "specvlm"}),
    ]


def tapped_layers(num_layers: int) -> list[int]:
    """One layer, the quarters of the model, and all of it."""
    quarters = [max(1, num_layers * part // 4) for part in (1, 2, 3, 4)]
    return list(dict.fromkeys([1, *quarters]))


def write_long_clips(folder: Path, num_clips: int, num_frames: int | None = None) -> list[Clip]:
    """Held-out clips of 12 x 12 tokens a frame as files, the question before every other one.

    ``num_frames`` are sampled from each (None: 14 or 16).
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for index in range(num_clips):
        if num_frames is None:
            clip = demo_clips.held_out("long", index, seed=SEED, min_objects=MIN_OBJECTS)
        else:
            clip = demo_clips.held_out_lasting(
                num_frames, index, seed=SEED, min_objects=MIN_OBJECTS
            )
        path = folder / f"{clip.name}.mp4"
        demo_clips.write_mp4(clip.scene, path, frame_rate=clip.frame_rate)
        written.append(Clip(path, texts.DETAILED[0], is_video_first=index % 2 == 0))
    return written


def rows_of(records: Sequence[Record], summary: Sequence[Row], group: str) -> list[Row]:
    """A row a system: the summary's figures and what concerns the first token."""
    baselines: dict[str, list[float]] = {}
    for record in records:
        if record.system == TARGET_ONLY:
            baselines.setdefault(record.clip, []).append(record.answer.ttft_s)
    rows = []
    for entry in summary:
        own = [record for record in records if record.system == entry["system"]]
        ratios = [record.answer.ttft_s / statistics.fmean(baselines[record.clip]) for record in own]
        row = {"group": group, **entry, "ttft_ratio": mean_interval(ratios).as_dict()}
        if entry["system"] != TARGET_ONLY:
            late = [record.answer.figures["timings_ms"].get(_FIRST_BLOCK) for record in own]
            late_ms = [value for value in late if value is not None]
            # A block that never came was not ready, either.
            is_ready = [value is not None and value <= 0 for value in late]
            row["first_block_ready"] = mean_interval(is_ready).as_dict()
            if late_ms:
                row["first_block_late_ms"] = mean_interval(late_ms).as_dict()
        row["serial_draft_share"] = _draft_share(own)
        rows.append(row)
    return rows


def _draft_share(records: Sequence[Record]) -> float | None:
    """Of the decoding: the target's waits for the draft; None unless the decoding is serial."""
    if any(record.answer.figures["policy"] != "serial" for record in records):
        return None
    shares = [
        record.answer.figures["timings_ms"]["target_wait"]
        / record.answer.figures["timings_ms"]["decode"]
        for record in records
    ]
    return round(statistics.fmean(shares), 4)


def _system(
    name: str, strategy: str, ratio: float, *, policy: str = "adaptive", gamma: int | None = None
) -> System:
    fields: dict[str, Any] = {"policy": policy, "pruning": {"strategy": strategy, "ratio": ratio}}
    if gamma is not None:
        fields["gamma"] = gamma
    return System(name, fields)
