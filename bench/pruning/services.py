"""Speedup and acceptance rate of strategies and policies, through the services."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.clips import ClipFile
from bench.pruning.samples import SampleClip
from bench.runs import run_systems, running_stack
from bench.systems import System, systems
from hippo.cli.stack import StackOptions

STRATEGIES = ("holistic", "hybrid", "attention", "specvlm", "uniform", "random")
RATIOS = (0.5, 0.9, 0.98)
_OTHER_POLICIES = ("serial", "vpsd", "always")  # beginnings of names; the default is adaptive


def measure_services(
    console: Console, options: StackOptions, clips: Sequence[SampleClip], *, ratio: float
) -> list[dict[str, Any]]:
    """Returns a row per strategy and ratio (adaptive policy), per other policy (holistic, at
    ``ratio``) and per preset."""
    with tempfile.TemporaryDirectory() as folder, running_stack(options) as stack:
        files = write_clips(Path(folder), clips)
        title = f"strategies and policies, {options.dtype}, T=0"
        chosen = [*strategy_systems(), *policy_systems(ratio)]
        _, run = run_systems(console, stack.url, files, chosen, title=title)
    rows: list[dict[str, Any]] = run["summary"]
    return rows


def strategy_systems() -> list[System]:
    """Returns all visual tokens, none, every strategy at every ratio, and the two presets."""
    found = [System(name, {"pruning": {"strategy": name}}) for name in ("none", "blind")]
    found += [
        System(f"{strategy} {ratio:g}", {"pruning": {"strategy": strategy, "ratio": ratio}})
        for strategy in STRATEGIES
        for ratio in RATIOS
    ]
    return found + [System(f"preset {name}", {"preset": name}) for name in ("hippo", "specvlm")]


def policy_systems(ratio: float) -> list[System]:
    """Returns the policies beside adaptive, at each draft length, with holistic pruning."""
    return [
        System(f"{system.name}, holistic {ratio:g}", system.speculative)
        for system in systems("holistic", ratio)
        if system.name.startswith(_OTHER_POLICIES)
    ]


def write_clips(folder: Path, clips: Sequence[SampleClip]) -> list[ClipFile]:
    """Writes the videos; every other question is video-first."""
    written: list[ClipFile] = []
    for clip in clips:
        path = folder / f"{clip.name}.mp4"
        path.write_bytes(clip.read_video())
        for question in dict.fromkeys(sample.question for sample in clip.samples):
            written.append(ClipFile(path, question, is_video_first=len(written) % 2 == 0))
    return written
