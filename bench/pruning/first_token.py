"""Time to first token against target-only: requests of a few tokens, in random order.

What a prefill beside the draft's costs is a percent or two of it, less than a machine drifts in a
minute; so every system's request is repeated among the others' and its median taken clip by clip.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from bench.client import Answer, ask, video_url
from bench.clips import Clip
from bench.pruning.statistics import mean_interval
from bench.systems import TARGET_ONLY, System
from hippo.benchmark.tables import progress_bar

_NUM_REPEATS = 3
_NUM_BASELINES = 2  # runs of target-only for each repeat of another system
_MAX_TOKENS = 8
_TIMINGS = ("selection", "target_prefill", "draft_prefill")


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer of one system about one clip."""

    clip: str
    system: str
    answer: Answer


def first_token_systems() -> list[System]:
    """The adaptive policy with each way to prune and without, and serial decoding."""
    pruned = {
        strategy: {"strategy": strategy, "ratio": 0.9}
        for strategy in ("holistic", "hybrid", "attention", "uniform")
    }
    none = {"strategy": "none", "ratio": 0.0}
    return [
        System(TARGET_ONLY, {"policy": "off"}),
        *(
            System(f"adaptive, {name} 0.9", {"policy": "adaptive", "pruning": pruning})
            for name, pruning in pruned.items()
        ),
        System("adaptive, none", {"policy": "adaptive", "pruning": none}),
        System("serial, holistic 0.9", {"policy": "serial", "pruning": pruned["holistic"]}),
    ]


def measure_first_tokens(
    console: Console, url: str, clips: Sequence[Clip], *, seed: int = 0
) -> list[Measured]:
    """Asks every system about every clip several times, in an order drawn anew each time."""
    systems = first_token_systems()
    round_of_asking = [*systems, *[systems[0]] * (_NUM_BASELINES - 1)]
    rng = random.Random(seed)
    measured = []
    with httpx.Client(base_url=url, timeout=600) as client, progress_bar(console) as progress:
        task = progress.add_task(
            "time to first token", total=len(clips) * _NUM_REPEATS * len(round_of_asking)
        )
        for system in systems:  # warm
            _ask(client, video_url(clips[0].path), clips[0], system)
        for clip in clips:
            video = video_url(clip.path)
            for _ in range(_NUM_REPEATS):
                for system in rng.sample(round_of_asking, len(round_of_asking)):
                    answer = _ask(client, video, clip, system)
                    measured.append(Measured(clip.path.name, system.name, answer))
                    progress.advance(task)
    return measured


def first_token_rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """A row a system: medians clip by clip over target-only's, and whether the draft was ready.

    For target-only the ratio is that of every other request over the rest: how exact this is.
    """
    baseline = _medians(measured, TARGET_ONLY)
    rows = []
    for system in dict.fromkeys(one.system for one in measured):
        own = [one for one in measured if one.system == system]
        if system == TARGET_ONLY:
            top, bottom = _medians(own[1::2], system), _medians(own[::2], system)
        else:
            top, bottom = _medians(own, system), baseline
        row: dict[str, Any] = {
            "system": system,
            "num_requests": len(own),
            "ttft_ms": round(1e3 * statistics.fmean(_medians(own, system).values()), 1),
            "ttft_ratio": mean_interval(
                [top[clip] / bottom[clip] for clip in top if clip in bottom]
            ).as_dict(),
        }
        for name in _TIMINGS:
            values = [_timing(one, name) for one in own]
            known = [value for value in values if value is not None]
            row[f"{name}_ms"] = round(statistics.median(known), 2) if known else None
        if system != TARGET_ONLY:
            late = [_timing(one, "first_block_after_first_token") for one in own]
            # A block that never came was not ready, either.
            row["first_block_ready"] = statistics.fmean(x is not None and x <= 0 for x in late)
            known = [value for value in late if value is not None]
            row["first_block_late_ms"] = round(statistics.median(known), 1) if known else None
        rows.append(row)
    return rows


def _medians(measured: Sequence[Measured], system: str) -> dict[str, float]:
    """Of the time to first token, in seconds, by clip."""
    times: dict[str, list[float]] = {}
    for one in measured:
        if one.system == system:
            times.setdefault(one.clip, []).append(one.answer.ttft_s)
    return {clip: statistics.median(values) for clip, values in times.items()}


def _timing(one: Measured, name: str) -> float | None:
    timings: Mapping[str, Any] = one.answer.figures["timings_ms"]
    value = timings.get(name)
    return None if value is None else float(value)


def _ask(client: httpx.Client, video: str, clip: Clip, system: System) -> Answer:
    return ask(
        client,
        video,
        clip.question,
        speculative=system.speculative,
        max_tokens=_MAX_TOKENS,
        is_video_first=clip.is_video_first,
    )
