"""Fits a machine to recorded answers: the costs with which the simulator repeats their sums.

What is fitted is that the simulated answers, with the same agreement traces under the same policy,
take as long as the recorded ones altogether: decode time, the target's forwards, its waits for the
draft, the draft's waits and step time, and how many forwards and draft tokens there are. Records
with a timeline (``python -m bench --timeline``) add the mean forward by number of rows, and from
their single forwards the target's step time is known beforehand (:mod:`bench.step_fit`); otherwise
nothing is read off the records but starting points.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import minimize

from bench.step_fit import TargetStep, fit_step
from hippo.simulation.machine import Machine, StepTime
from hippo.simulation.replay import PolicyChoice, replay_each
from hippo.simulation.traces import Trace
from hippo.speculation.simulator import Outcome

MOST_REPLAYS = 800
_MS = 1e6
_JITTER = 0.1  # of times; it decides who comes first where draft and target nearly meet
_ROW_CLASSES = (1, 4, 9, 17)  # forwards of similar size: the most rows of each class but the last

# Each parameter with the spread that its starting point is trusted to, in logarithms. What the
# sums of one policy do not tell apart stays near the start.
_SPREADS = {
    "one_row": 0.02,  # known from the baseline
    "several": 0.5,
    "row": 0.3,
    "draft": 0.3,
    "draft_row": 1.0,
    "leg": 0.5,
    "draft_message": 0.5,
    "draft_verdict": 1.0,
    "target_message": 0.7,
    "target_scheduling": 0.2,
    "target_contention": 0.7,
    "draft_contention": 1.0,
}
# The same, where single forwards were recorded.
_KNOWN_SPREADS = {"several": 0.1, "row": 0.05, "target_message": 0.3}
# How well each sum should be met: as a share of the decode time, and of itself.
_OF_DECODE = {"decode": 0.005, "forward": 0.005, "wait": 0.01, "rest": 0.01, "draft_wait": 0.02}
_OF_ITSELF = {"num_forwards": 0.01, "num_drafted": 0.02, "draft_step": 0.05}


@dataclass(slots=True)
class Sums:
    """Over answers; times in milliseconds."""

    num_tokens: int = 0  # decoded: all but each answer's first
    num_forwards: int = 0
    num_draft_tokens: int = 0  # rows that held one
    num_drafted: int = 0
    decode: float = 0.0
    forward: float = 0.0
    wait: float = 0.0  # of the target for the draft
    draft_wait: float = 0.0
    draft_step: float = 0.0  # the draft's running mean at the end of each answer
    by_rows: dict[int, tuple[int, float]] = field(default_factory=dict)  # class: count, time

    @property
    def rest(self) -> float:
        """When the target's device neither worked nor waited for the draft."""
        return self.decode - self.forward - self.wait

    def add_forward(self, num_rows: int, duration_ms: float) -> None:
        """Counts one forward of the target in its class."""
        row_class = bisect_left(_ROW_CLASSES, num_rows)
        count, total = self.by_rows.get(row_class, (0, 0.0))
        self.by_rows[row_class] = (count + 1, total + duration_ms)


def recorded(records: Sequence[Mapping[str, Any]]) -> Sums:
    """The sums of records that ``python -m bench`` wrote."""
    sums = Sums()
    for record in records:
        figures = record["figures"]
        times = figures["timings_ms"]
        sums.num_tokens += record["num_tokens"] - 1
        sums.num_forwards += figures["num_forwards"]
        sums.num_draft_tokens += figures["num_draft_tokens"]
        sums.num_drafted += figures["num_drafted_tokens"]
        sums.decode += times["decode"]
        sums.forward += times["target_forward"]
        sums.wait += times["target_wait"]
        sums.draft_wait += times["draft_wait"]
        sums.draft_step += times["draft_step"] or 0.0
        for verdict in figures.get("timeline_ms", {}).get("verdicts", ())[1:]:
            sums.add_forward(verdict["rows"], verdict["forward"])
    return sums


def simulated(outcomes: Sequence[Outcome]) -> Sums:
    """The same sums of simulated answers."""
    sums = Sums()
    for outcome in outcomes:
        stats = outcome.stats
        sums.num_tokens += len(outcome.output_ids) - 1
        sums.num_forwards += stats.num_forwards
        sums.num_draft_tokens += stats.num_draft_tokens
        sums.num_drafted += stats.num_drafted_tokens
        sums.decode += outcome.decode_ns / _MS
        sums.forward += stats.forward_ns / _MS
        sums.wait += stats.target_wait_ns / _MS
        sums.draft_wait += stats.draft_wait_ns / _MS
        sums.draft_step += stats.draft_step_ns / _MS
        for verdict in outcome.verdicts[1:]:
            sums.add_forward(verdict.timing.num_rows, verdict.timing.forward_ns / _MS)
    return sums


def replayed(policy: PolicyChoice, traces: Sequence[Trace], machine: Machine) -> Sums:
    """The sums of the traces' answers under a policy on a machine."""
    return simulated(replay_each(policy, traces, machine))


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted machine; ``misfit`` is the loss at the end, near 0 where all sums are met."""

    machine: Machine
    misfit: float


def fit(
    records: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    traces: Sequence[Trace],
    policy: PolicyChoice,
    *,
    name: str,
    most_replays: int = 0,
) -> Fit:
    """The machine on which ``policy`` over ``traces`` takes what the records say.

    ``baseline`` are target-only answers on the same clips: what one row takes alone. ``traces``
    are those of the records' answers, in any order. Powell's method on the logarithms of the
    parameters, from starting points in the records, with ``most_replays`` (0: the default)
    simulations of all traces; deterministic. Raises ValueError when records and traces are not of
    the same number of tokens, or the policy does not draft.
    """
    goal = recorded(records)
    num_tokens = sum(len(trace.agrees) - 1 for trace in traces)
    if goal.num_tokens != num_tokens:
        raise ValueError(f"the records have {goal.num_tokens} tokens, the traces {num_tokens}")
    if not goal.num_drafted:
        raise ValueError("nothing is to be learnt about the draft from answers without one")
    step = fit_step([*records, *baseline])
    start, frame = _start(goal, recorded(baseline), len(records), step), _frame(records, name, step)
    # While a serial draft drafts, the target waits: what they take from each other is not seen.
    hidden = ("target_contention", "draft_contention") if policy.name == "serial" else ()
    names = [key for key in _SPREADS if key not in hidden]
    origin = np.log([start[key] for key in names])
    known = _KNOWN_SPREADS if step is not None else {}
    spreads = np.array([known.get(key, _SPREADS[key]) for key in names])

    def machine_at(point: np.ndarray) -> Machine:
        return _machine(frame, dict(zip(names, np.exp(point).tolist(), strict=True)))

    def loss(point: np.ndarray) -> float:
        distance = (point - origin) / spreads
        if np.abs(point - origin).max() > 4:  # far from anything real: do not even try
            return 1e6
        value = _misfit(goal, replayed(policy, traces, machine_at(point)))
        return value + float(distance @ distance)

    found = minimize(
        loss,
        origin,
        method="Powell",
        options={"maxfev": most_replays or MOST_REPLAYS, "xtol": 1e-3, "ftol": 1e-4},
    )
    return Fit(machine_at(found.x), float(found.fun))


def _misfit(goal: Sums, found: Sums) -> float:
    value = 0.0
    for name, share in _OF_DECODE.items():
        value += ((getattr(found, name) - getattr(goal, name)) / goal.decode / share) ** 2
    for name, share in _OF_ITSELF.items():
        value += (getattr(found, name) / getattr(goal, name) - 1) ** 2 / share**2
    for row_class, (count, total) in goal.by_rows.items():
        if (own := found.by_rows.get(row_class)) is not None:
            weight = count / goal.num_forwards / 0.01**2
            value += weight * (own[1] / own[0] / (total / count) - 1) ** 2
    return value


def _start(goal: Sums, alone: Sums, num_answers: int, known: TargetStep | None) -> dict[str, float]:
    """Rough guesses of every parameter, in milliseconds; of the target's step what is known."""
    more_rows = goal.num_draft_tokens / goal.num_forwards
    one_row = alone.forward / alone.num_forwards
    several = 0.06 * one_row
    more = goal.forward / goal.num_forwards - one_row - several
    step = goal.draft_step / num_answers
    row, message = max(more / max(more_rows, 1), 0.02 * one_row), 0.1
    if known is not None:
        time = known.time
        one_row, message = time.one_row_ms, max(known.message_ms, 0.01)
        several, row = max(time.several_ms, 0.005 * one_row), max(time.row_ms, 0.005 * one_row)
    return {
        "one_row": one_row,
        "several": several,
        "row": row,
        "draft": 0.7 * step,
        "draft_row": 0.15 * step,
        "leg": 0.25,
        "draft_message": 0.2,
        "draft_verdict": 1.5 * step,
        "target_message": message,
        "target_scheduling": max(alone.rest / alone.num_forwards, 1e-3),
        "target_contention": 0.05,
        "draft_contention": 0.2,
    }


def _frame(records: Sequence[Mapping[str, Any]], name: str, step: TargetStep | None) -> Machine:
    """What is read off the records: the prefills, when the draft's may begin, what cached tokens
    cost the target."""

    def mean(key: str) -> float:
        values = [record["figures"]["timings_ms"][key] for record in records]
        return math.fsum(value or 0.0 for value in values) / len(values)

    prefill, draft_prefill = mean("target_prefill"), mean("draft_prefill")
    begin = prefill + mean("first_block_after_first_token") - draft_prefill
    return Machine(
        name=name,
        target=step.time if step is not None else StepTime(one_row_ms=1.0),
        draft=StepTime(one_row_ms=1.0),
        target_prefill_ms=prefill,
        draft_prefill_ms=draft_prefill,
        selection_ms=max(0.0, begin - 4 * mean("draft_step")),
        jitter=_JITTER,
    )


def _machine(frame: Machine, parameters: Mapping[str, float]) -> Machine:
    return dataclasses.replace(
        frame,
        target=dataclasses.replace(
            frame.target,
            one_row_ms=parameters["one_row"],
            several_ms=parameters["several"],
            row_ms=parameters["row"],
        ),
        draft=StepTime(one_row_ms=parameters["draft"], several_ms=parameters["draft_row"]),
        leg_ms=parameters["leg"],
        draft_message_ms=parameters["draft_message"],
        draft_verdict_ms=parameters["draft_verdict"],
        target_message_ms=parameters["target_message"],
        target_scheduling_ms=parameters["target_scheduling"],
        target_contention=parameters.get("target_contention", 0.0),
        draft_contention=parameters.get("draft_contention", 0.0),
    )
