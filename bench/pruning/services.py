"""Speedup, times and accepted tokens of strategies, options and presets, through the services."""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.answers.runs import run_systems, running_stack
from bench.answers.systems import System
from bench.base.clips import ClipFile
from bench.pruning.choices import RATIOS
from bench.pruning.traces import Sample
from hippo.cli.stack import StackOptions
from hippo.client.latency import Record

SWEPT = ("holistic", "uv", "specvlm", "uniform")
OTHERS = ("attention", "random")  # at one ratio
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "variance as spatial score": {"spatial_score": "variance"},
    "spread 0": {"spread": 0.0},
    "all layers score": {"score_layer_share": 1.0},
    "causal attention": {"causal_attention": True},
    "compacted positions": {"compacted_positions": True},
}


def measure_services(
    console: Console, options: StackOptions, clips: Sequence[Sequence[Sample]], *, ratio: float
) -> list[dict[str, Any]]:
    """Returns a row per strategy and ratio, per option of holistic at ``ratio`` (all under the
    adaptive policy), and per preset; target-only is the first."""
    with tempfile.TemporaryDirectory() as folder, running_stack(options) as stack:
        files = write_clips(Path(folder), clips)
        title = f"strategies and options, {options.dtype}, T=0"
        chosen = [*strategy_systems(ratio), *option_systems(ratio), *preset_systems()]
        records, run = run_systems(console, stack.url, files, chosen, title=title)
    rows: list[dict[str, Any]] = run["summary"]
    for row in rows:
        row |= answer_times([record for record in records if record.system == row["system"]])
    return rows


def strategy_systems(ratio: float) -> list[System]:
    """Returns all visual tokens, none, four strategies at every ratio, the others at ``ratio``."""
    found = [System(name, {"pruning": {"strategy": name}}) for name in ("none", "blind")]
    chosen = [(strategy, each) for strategy in SWEPT for each in RATIOS]
    chosen += [(strategy, ratio) for strategy in OTHERS]
    return found + [
        System(f"{strategy} {each:g}", {"pruning": {"strategy": strategy, "ratio": each}})
        for strategy, each in chosen
    ]


def option_systems(ratio: float) -> list[System]:
    """Returns holistic at ``ratio`` with one option changed each."""
    pruning = {"strategy": "holistic", "ratio": ratio}
    return [
        System(f"holistic {ratio:g}, {name}", {"pruning": {**pruning, **changed}})
        for name, changed in OPTIONS.items()
    ]


def preset_systems() -> list[System]:
    """Returns the published systems, and SpecVLM's at original positions."""
    original = {"preset": "specvlm", "pruning": {"compacted_positions": False}}
    return [
        *(System(f"preset {name}", {"preset": name}) for name in ("hippo", "specvlm")),
        System("preset specvlm, original positions", original),
    ]


def answer_times(records: Sequence[Record]) -> dict[str, Any]:
    """Returns times in milliseconds, and mean accepted tokens: the tokens of all answers but the
    corrected ones, over rejections. None for what there was not."""
    figures = [record.figures for record in records]
    prefills = [each["timings_ms"]["draft_prefill"] for each in figures]
    num_rejections = sum(each["num_rejections"] for each in figures)
    num_tokens = sum(record.answer.num_tokens for record in records)
    return {
        "end_to_end_ms": statistics.fmean(1e3 * each.answer.end_to_end_s for each in records),
        "draft_prefill_ms": None if None in prefills else statistics.fmean(prefills),
        "accepted_tokens": num_tokens / num_rejections - 1 if num_rejections else None,
    }


def write_clips(folder: Path, clips: Sequence[Sequence[Sample]]) -> list[ClipFile]:
    """Writes the videos of samples, given clip by clip; every other question is video-first."""
    written: list[ClipFile] = []
    for sample, *_ in clips:
        path = folder / f"{sample.clip}.mp4"
        path.write_bytes(sample.video)
        written.append(ClipFile(path, sample.question, is_video_first=len(written) % 2 == 0))
    return written
