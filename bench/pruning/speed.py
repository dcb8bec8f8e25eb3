"""The speed that an agreement gives: step times of the pair, and replays of the agreement."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.pruning.statistics import Counts
from bench.pruning.traces import ClipTrace
from hippo.lab.simulation.machine import ForwardTime, Machine
from hippo.lab.simulation.replay import PolicyChoice, replay_all
from hippo.lab.simulation.traces import Trace
from hippo.models.interface.base import SequenceRows, StepPlan, VideoLanguageModel
from hippo.pruning.select import num_kept, select_tokens
from hippo.types import Pruning, PruningStrategy

ROWS = (1, 2, 4, 8, 16, 32)
_REPEATS = 9
_RATIOS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0)


@dataclass(frozen=True, slots=True)
class MeasuredForward:
    """The ForwardCost of measured forwards, by rows: between two numbers of rows that were measured
    it lies on a straight line; beyond them it stays as it is."""

    times_ms: Mapping[int, float]

    def ms(self, num_rows: int, context: int) -> float:
        return float(np.interp(num_rows, list(self.times_ms), list(self.times_ms.values())))


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Times of a pair on one clip, in milliseconds: of the target's forwards by rows, and of the
    draft's prefill (without its vision tower) and of its step by the share pruned."""

    num_prompt_tokens: int
    num_visual_tokens: int
    target: Mapping[int, float]
    draft_prefill: Mapping[float, float]
    draft_step: Mapping[float, float]

    @property
    def machine(self) -> Machine:
        """The machine for replays, without transport and messages. The draft's step is a straight
        line over its cached tokens, by least squares."""
        num_text = self.num_prompt_tokens - self.num_visual_tokens
        lengths = [
            (num_text + num_kept(self.num_visual_tokens, ratio)) / 1000 for ratio in self.draft_step
        ]
        steps = list(self.draft_step.values())
        slope, level = statistics.linear_regression(lengths, steps)
        if slope < 0:  # a level line fits best among lines that do not fall
            slope, level = 0.0, statistics.fmean(steps)
        return Machine(
            name="measured",
            target=MeasuredForward(self.target),
            draft=ForwardTime(one_row_ms=level, kilotoken_ms=slope),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the times for JSON."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "target_ms": {str(rows): round(ms, 3) for rows, ms in self.target.items()},
            "draft_prefill_ms": {f"{r:g}": round(ms, 3) for r, ms in self.draft_prefill.items()},
            "draft_step_ms": {f"{r:g}": round(ms, 3) for r, ms in self.draft_step.items()},
        }


def measure_steps(
    target: VideoLanguageModel, draft: VideoLanguageModel, clip: ClipTrace
) -> MeasuredTimes:
    """Measures both models on a clip's first sample, everything in turns, and takes medians."""
    prompt, ids = clip.samples[0].prompt, clip.samples[0].output_ids
    count = clip.target_features.shape[0]
    kept = {
        ratio: select_tokens(Pruning(PruningStrategy.UNIFORM, ratio), clip.grids, count)
        for ratio in _RATIOS
    }
    samples: dict[tuple[str, float], list[float]] = {}

    def timed(name: str, key: float, run: Callable[[], object]) -> None:
        began_s = perf_counter()
        run()
        samples.setdefault((name, key), []).append(1e3 * (perf_counter() - began_s))

    def step(model: VideoLanguageModel, num_rows: int) -> Callable[[], object]:
        rows = tuple(ids[place % len(ids)] for place in range(num_rows))
        return lambda: model.forward(StepPlan((SequenceRows(0, 0, rows),))).argmax(-1).tolist()

    def prefill(ratio: float) -> None:
        *_, logits = draft.prefill(0, prompt, clip.draft_features, kept[ratio])
        assert logits is not None
        logits.argmax().item()

    # Times do not depend on what the target sees.
    num_rows = prompt.visual_indices.shape[0] + prompt.other_indices.shape[0]
    blank = torch.zeros(num_rows, target.hidden_size, device=target.info.device)
    deque(target.prefill(0, prompt, blank, None), maxlen=0)
    for _ in range(_REPEATS):
        for rows in ROWS:
            timed("target", rows, step(target, rows))
        for ratio in _RATIOS:
            timed("prefill", ratio, partial(prefill, ratio))
            timed("step", ratio, step(draft, 1))
    medians = {key: statistics.median(values) for key, values in samples.items()}
    return MeasuredTimes(
        prompt.length,
        count,
        {rows: medians["target", rows] for rows in ROWS},
        {ratio: medians["prefill", ratio] for ratio in _RATIOS},
        {ratio: medians["step", ratio] for ratio in _RATIOS},
    )


@dataclass(frozen=True, slots=True)
class Replayed:
    """A choice's answers under the adaptive policy: tokens over forwards, and target-only time over
    decode time, by clip."""

    tokens_a_pass: Counts
    decode_speedup: Counts


def replay_agreement(traces: Sequence[Trace], machine: Machine) -> Replayed:
    """Replays traces, each named by its clip, on a machine without overhead."""
    traces = [trace for trace in traces if len(trace.agrees) > 1]  # the prefill settles one token
    off, adaptive = (
        replay_all(PolicyChoice(name), traces, machine).outcomes for name in ("off", "adaptive")
    )
    found = Replayed(Counts(), Counts())
    for trace, alone, outcome in zip(traces, off, adaptive, strict=True):
        stats = outcome.stats
        num_right = stats.num_accepted_tokens + stats.num_accepted_reused
        found.tokens_a_pass.add_hits(trace.name, stats.num_forwards + num_right, stats.num_forwards)
        found.decode_speedup.add_hits(trace.name, alone.decode_ns, outcome.decode_ns)
    return found
