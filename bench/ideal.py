"""The ideal pipeline: how fast the traces of measured answers can be decoded without overhead.

The ideal has the step times and the rejections of the measured answers, and no transport, messages
or scheduling. Its target verifies all queued draft tokens; after a rejection it waits for the
number of draft tokens that is best for these very answers, or decodes a token alone. Nobody knows
that number beforehand, so a policy that measures it comes near the ideal at best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hippo.benchmark.latency import Record
from hippo.simulation.machine import ForwardTime, Machine
from hippo.simulation.replay import (
    PolicyChoice,
    best_gamma,
    compare,
    parse_policies,
    replay_all,
)
from hippo.simulation.traces import Trace, drawn_traces
from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import MAX_DRAFT_TOKENS, FixedPolicy, Policy, optimistic_pace
from hippo.types import Pace, StepLimits

_MOST_FIRST = 20  # draft tokens that the idle target waits for; the best is well below


@dataclass(frozen=True, slots=True)
class _Pipeline(PolicyChoice):
    """Always drafts; ``gamma`` is the number of tokens that the target waits for at first."""

    name: str = "pipeline"

    def new_policy(self, times: PairTimes | None = None) -> Policy:
        pace = optimistic_pace(MAX_DRAFT_TOKENS)
        limits = pace.optimistic
        first = StepLimits(self.gamma, limits.max_draft_tokens, limits.wait_ns)
        return FixedPolicy(Pace(limits, first, pace.max_ahead, pace.block_size))


def ideal_speedup(traces: Sequence[Trace], machine: Machine) -> float:
    """Returns the decode speedup of the ideal pipeline over target-only, on these traces."""
    free = machine.ideal()
    choices = [
        *(_Pipeline("pipeline", first) for first in range(_MOST_FIRST + 1)),
        *(best_gamma(name, traces, free) for name in ("serial", "vpsd")),
    ]
    fastest = min(replay_all(choice, traces, free).decode_ns for choice in choices)
    return replay_all(PolicyChoice("off"), traces, free).decode_ns / fastest


def simulated_lines(machine: Machine, shares: Sequence[float]) -> dict[str, list[float]]:
    """Returns the decode speedups that the simulator predicts for serial and vpsd at their best
    lengths and for adaptive, at each share of independent agreement."""
    lines: dict[str, list[float]] = {"serial": [], "vpsd": [], "adaptive": []}
    for share in shares:
        traces = drawn_traces(agreement=share, num_traces=12, num_tokens=120)
        for row in compare(parse_policies("serial:best,vpsd:best,adaptive"), traces, machine):
            lines[row.policy.name].append(row.decode_speedup)
    return lines


def measured_machine(records: Sequence[Record]) -> Machine:
    """Returns the step times of one pair from records with timelines, without any overhead.

    The target's forward is a straight line over its rows, fitted by least squares; the draft's step
    is the mean over the answers with a draft.
    """
    forwards = [
        (verdict["rows"], verdict["forward"])
        for record in records
        for verdict in _verdicts(record)[1:]  # the first is the prefill
    ]
    rows, forward_ms = np.array(forwards).T
    row_ms, fixed_ms = np.polyfit(rows, forward_ms, 1)
    steps = [record.figures["timings_ms"]["draft_step"] for record in records]
    return Machine(
        name="measured",
        target=ForwardTime(one_row_ms=float(fixed_ms + row_ms), row_ms=max(float(row_ms), 0.0)),
        draft=ForwardTime(one_row_ms=float(np.mean([step for step in steps if step]))),
    )


def trace_of(record: Record) -> Trace:
    """Returns where the draft agreed with the target in an answer under a policy that always
    drafts ahead, as `vpsd` does."""
    agrees: list[bool] = []
    for verdict in _verdicts(record):
        agrees += [True] * verdict["tokens"]
        if verdict["is_rejection"]:
            agrees[-1] = False
    return Trace(tuple(agrees), name=record.clip)


def _verdicts(record: Record) -> Sequence[Mapping[str, Any]]:
    verdicts: Sequence[Mapping[str, Any]] = record.figures["timeline_ms"]["verdicts"]
    return verdicts
