"""Through the real services: speedups, acceptance and time to first token."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.clips import Clip
from bench.measure import Record
from bench.pruning.samples import MIN_OBJECTS, SEED
from bench.pruning.statistics import Counts, interval, mean_interval
from bench.runs import run_systems, running_stack
from bench.systems import TARGET_ONLY, System
from demo import clips as demo_clips
from demo import texts
from hippo.cli.stack import StackOptions, default_cores

STRATEGIES = ("holistic", "hybrid", "attention", "specvlm", "uniform", "random")
RATIOS = (0.5, 0.75, 0.9, 0.95, 0.98)
NUM_FRAMES = (8, 16, 32, 64, 128)
_FRAMES_CLIPS = 4
_CONTEXT = 12288  # 128 frames of 336 x 336 are 9,216 visual tokens
_FIRST_BLOCK = "first_block_after_first_token"


def measure_strategies(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    """Strategies by ratio; then policies at ratio 0.9; then without the overlap of prefills."""
    rows: list[dict[str, Any]] = []
    num_layers = _num_layers(args.target_model)
    with tempfile.TemporaryDirectory() as folder:
        clips = write_long_clips(Path(folder), args.clips)
        with running_stack(_stack(args)) as url:
            rows += _measure(console, url, clips, strategy_systems(), "strategies")
            rows += _measure(console, url, clips, policy_systems(), "policies")
        late = _stack(args, ("--score-layers", str(num_layers)))
        with running_stack(late) as url:
            rows += _measure(console, url, clips, overlap_systems(), "no overlap")
    return {"rows": rows}


def measure_frames(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    """A few systems on clips from which 8 to 128 frames are taken."""
    rows: list[dict[str, Any]] = []
    context = ("--max-context-length", str(_CONTEXT))
    num_clips = min(args.clips, _FRAMES_CLIPS)
    options = _stack(args, context, context)
    with tempfile.TemporaryDirectory() as folder, running_stack(options) as url:
        for num_frames in NUM_FRAMES:
            clips = write_long_clips(Path(folder) / str(num_frames), num_clips, num_frames)
            found = _measure(console, url, clips, frame_systems(), f"{num_frames} frames")
            rows += [{**row, "num_frames": num_frames} for row in found]
    return {"rows": rows, "num_clips": num_clips}


def strategy_systems() -> list[System]:
    """Every strategy at every ratio under the adaptive policy, and serial decoding at 0 and 0.9."""
    chosen = [_system("none", "none", 0.0), _system("blind", "blind", 0.0)]
    for strategy in STRATEGIES:
        chosen += [_system(f"{strategy} {ratio:g}", strategy, ratio) for ratio in RATIOS]
    return chosen


def policy_systems() -> list[System]:
    """Policies on holistic at ratio 0.9; serial also without pruning; the two papers' systems."""
    chosen = [
        _system(f"{policy}, holistic 0.9", "holistic", 0.9, policy=policy)
        for policy in ("adaptive", "optimistic", "conservative")
    ]
    for gamma in (5, 10):
        chosen += [
            _system(f"vpsd γ={gamma}, holistic 0.9", "holistic", 0.9, policy="vpsd", gamma=gamma),
            _system(f"serial γ={gamma}, specvlm 0.9", "specvlm", 0.9, policy="serial", gamma=gamma),
            _system(f"serial γ={gamma}, none", "none", 0.0, policy="serial", gamma=gamma),
        ]
    return chosen


def overlap_systems() -> list[System]:
    """On a target that scores on all its layers, so that the draft begins after its prefill."""
    return [
        _system("adaptive, holistic 0.9, scored on all layers", "holistic", 0.9),
        _system("adaptive, uniform 0.9, announced at once", "uniform", 0.9),
    ]


def frame_systems() -> list[System]:
    """Pruned and not, in parallel and serially."""
    return [
        _system("adaptive, none", "none", 0.0),
        _system("adaptive, holistic 0.9", "holistic", 0.9),
        _system("vpsd γ=5, holistic 0.9", "holistic", 0.9, policy="vpsd", gamma=5),
        _system("serial γ=5, specvlm 0.9", "specvlm", 0.9, policy="serial", gamma=5),
    ]


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


def rows_of(
    records: Sequence[Record], summary: Sequence[dict[str, Any]], group: str
) -> list[dict[str, Any]]:
    """A row a system: the summary's figures and what concerns the first token."""
    baselines: dict[str, list[float]] = {}
    for record in records:
        if record.system == TARGET_ONLY:
            baselines.setdefault(record.clip, []).append(record.answer.ttft_s)
    rows = []
    for entry in summary:
        own = [record for record in records if record.system == entry["system"]]
        ratios = [record.answer.ttft_s / statistics.fmean(baselines[record.clip]) for record in own]
        ready = Counts.empty()
        for record in own:
            late_ms = record.answer.figures["timings_ms"].get(_FIRST_BLOCK)
            if late_ms is not None:
                ready.add(record.clip, late_ms <= 0, 1)
        row = {"group": group, **entry, "ttft_ratio": mean_interval(ratios).as_dict()}
        if ready.num_clips:
            row["first_block_ready"] = interval(ready).as_dict()
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


def _measure(
    console: Console, url: str, clips: Sequence[Clip], systems: Sequence[System], group: str
) -> list[dict[str, Any]]:
    title = f"{group}, float32, T=0"
    records, run = run_systems(console, url, clips, systems, title=title)
    return rows_of(records, run["summary"], group)


def _system(
    name: str, strategy: str, ratio: float, *, policy: str = "adaptive", gamma: int | None = None
) -> System:
    fields: dict[str, Any] = {"policy": policy, "pruning": {"strategy": strategy, "ratio": ratio}}
    if gamma is not None:
        fields["gamma"] = gamma
    return System(name, fields)


def _stack(
    args: argparse.Namespace,
    target_args: tuple[str, ...] = (),
    draft_args: tuple[str, ...] = (),
) -> StackOptions:
    target_core, draft_core = default_cores("cpu", "cpu")
    if args.layers is not None and "--score-layers" not in target_args:
        target_args = (*target_args, "--score-layers", str(args.layers))
    return StackOptions(
        target_model=str(args.target_model),
        draft_model=str(args.draft_model),
        dtype="float32",
        target_core=target_core,
        draft_core=draft_core,
        port=0,
        target_args=target_args,
        draft_args=draft_args,
        gateway_args=("--max-draft-tokens", "32"),
    )


def _num_layers(model_folder: Path) -> int:
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["num_hidden_layers"])
