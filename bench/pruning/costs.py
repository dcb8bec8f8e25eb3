"""What the draft costs at each ratio: prefill time, cache bytes, its share of serial decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from bench.pruning.choices import Choice
from bench.pruning.statistics import mean_interval
from bench.pruning.traces import ClipTrace, SampleTrace, decoded_frames, messages_of
from bench.simulate_policies import Machine
from hippo.models.base import SequenceRows, StepPlan, VideoLanguageModel
from hippo.types import FramePlan, PruningStrategy

GAMMAS = (3, 5, 7)
RATIOS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98)
_REPEATS = 9
_PLACE = 40  # completion index at which decode steps are timed


def measure_costs(
    clips: Iterable[ClipTrace],
    target: VideoLanguageModel,
    draft: VideoLanguageModel,
    *,
    cache_bytes_per_token: int,
) -> list[dict[str, Any]]:
    """A row a ratio, each figure the mean over clips of medians over repeats.

    ``cache_bytes_per_token`` is the draft's.
    """
    samples: dict[float, list[dict[str, float]]] = {ratio: [] for ratio in RATIOS}
    for clip in clips:
        trace = clip.samples[0]
        shared = _shared_times(clip, trace, target, draft)
        for ratio in RATIOS:
            times = _draft_times(clip, trace, draft, ratio)
            times["draft_cache_kib"] = times["cached_prompt_tokens"] * cache_bytes_per_token / 1024
            samples[ratio].append({**shared, **times})
    return [_row(ratio, each) for ratio, each in samples.items()]


def machine_from(rows: list[dict[str, Any]]) -> Machine:
    """The simulator's machine with the step times measured at ratio 0.9; transport by default."""
    row = next(row for row in rows if row["ratio"] == 0.9)
    target_ms, draft_ms = row["target_step_ms"]["mean"], row["draft_step_ms"]["mean"]
    return Machine(target_ms=target_ms, step_ratio=target_ms / draft_ms, noise=0.0)


def _shared_times(
    clip: ClipTrace, trace: SampleTrace, target: VideoLanguageModel, draft: VideoLanguageModel
) -> dict[str, float]:
    """What the ratio does not change: both towers and the target."""
    frames = [decoded_frames(clip.clip)]
    prompt = target.prepare(messages_of(trace.sample), frames, FramePlan())
    times = {
        "target_tower_ms": _median_ms(lambda: target.embed_visual(prompt), 3),
        "draft_tower_ms": _median_ms(lambda: draft.embed_visual(prompt), 3),
        "target_prefill_ms": _median_ms(
            lambda: _prefill(target, trace, clip.target_features, None), 3
        ),
        "target_step_ms": _median_ms(lambda: _step(target, trace, 1), _REPEATS),
    }
    for gamma in GAMMAS:
        verify = partial(_step, target, trace, gamma + 1)
        times[f"target_verify_ms {gamma}"] = _median_ms(verify, _REPEATS)
    return times


def _draft_times(
    clip: ClipTrace, trace: SampleTrace, draft: VideoLanguageModel, ratio: float
) -> dict[str, float]:
    strategy = PruningStrategy.UNIFORM if ratio else PruningStrategy.NONE
    kept = Choice(strategy=strategy, ratio=ratio, num_layers=1).kept(clip, trace, 0)
    prefill_ms = _median_ms(
        lambda: _prefill(draft, trace, clip.draft_features, kept), 3 if ratio < 0.5 else _REPEATS
    )
    cached = trace.prompt.length - clip.draft_features.shape[0] + kept.shape[0]
    return {
        "kept_tokens": float(kept.shape[0]),
        "cached_prompt_tokens": float(cached),
        "draft_prefill_ms": prefill_ms,
        "draft_step_ms": _median_ms(lambda: _step(draft, trace, 1), _REPEATS),
    }


def _row(ratio: float, samples: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"ratio": ratio, "num_clips": len(samples)}
    for name in samples[0]:
        row[name] = mean_interval([sample[name] for sample in samples]).as_dict()
    for gamma in GAMMAS:
        row[f"draft_share γ={gamma}"] = mean_interval(
            [_draft_share(sample, gamma) for sample in samples]
        ).as_dict()
    return row


def _draft_share(sample: dict[str, float], gamma: int) -> float:
    """Of a round of serial decoding: gamma draft steps, then one target forward."""
    draft_ms = gamma * sample["draft_step_ms"]
    return draft_ms / (draft_ms + sample[f"target_verify_ms {gamma}"])


def _prefill(
    model: VideoLanguageModel,
    trace: SampleTrace,
    features: torch.Tensor,
    kept: torch.Tensor | None,
) -> None:
    for _ in model.prefill(0, trace.prompt, features, kept):
        pass


def _step(model: VideoLanguageModel, trace: SampleTrace, num_rows: int) -> None:
    ids = trace.output_ids[_PLACE : _PLACE + num_rows]
    model.forward(StepPlan((SequenceRows(0, _PLACE, ids),)))


def _median_ms(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)
