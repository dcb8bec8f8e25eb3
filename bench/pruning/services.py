"""Speedup and acceptance rate of the pruning strategies, through the services."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.clips import ClipFile
from bench.pruning.samples import MIN_OBJECTS, SEED
from bench.runs import bundled_pair, run_systems, running_stack
from bench.systems import System
from demo import clips as demo_clips
from demo import texts

STRATEGIES = ("holistic", "hybrid", "attention", "specvlm", "uniform", "random")
RATIOS = (0.5, 0.9, 0.98)


def measure_strategies(console: Console, num_clips: int) -> list[dict[str, Any]]:
    """Returns a row per strategy and ratio (adaptive policy) and per preset, in float32."""
    options = bundled_pair("float32", draft_dtype="float32")
    with tempfile.TemporaryDirectory() as folder, running_stack(options) as stack:
        clips = write_long_clips(Path(folder), num_clips)
        title = "strategies, float32, T=0"
        _, run = run_systems(console, stack.url, clips, strategy_systems(), title=title)
    rows: list[dict[str, Any]] = run["summary"]
    return rows


def strategy_systems() -> list[System]:
    """Returns all visual tokens, none, every strategy at every ratio, and the two presets."""
    systems = [System(name, {"pruning": {"strategy": name}}) for name in ("none", "blind")]
    systems += [
        System(f"{strategy} {ratio:g}", {"pruning": {"strategy": strategy, "ratio": ratio}})
        for strategy in STRATEGIES
        for ratio in RATIOS
    ]
    return systems + [System(f"preset {name}", {"preset": name}) for name in ("hippo", "specvlm")]


def write_long_clips(folder: Path, num_clips: int) -> list[ClipFile]:
    """Writes held-out clips of 12 x 12 tokens per frame; every other question is video-first."""
    written = []
    for index in range(num_clips):
        clip = demo_clips.held_out("long", index, seed=SEED, min_objects=MIN_OBJECTS)
        path = folder / f"{clip.name}.mp4"
        demo_clips.write_mp4(clip.scene, path, frame_rate=clip.frame_rate)
        written.append(ClipFile(path, texts.DETAILED[0], is_video_first=index % 2 == 0))
    return written
