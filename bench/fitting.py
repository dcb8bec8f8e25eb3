"""Fits a machine to recorded answers: the costs with which the simulator repeats their sums.

What is fitted is that the simulated answers, with the same agreement traces and policies, take as
long as the recorded ones altogether: decode time, the target's forwards, its waits for the draft,
the draft's waits and step time, and how many forwards and draft tokens there are. Records with a
timeline (``python -m bench --timeline``) add the mean forward by number of rows, and from their
single forwards the target's step time is known beforehand (:mod:`bench.step_fit`); otherwise
nothing is read off the records but starting points. A calibration (:mod:`bench.calibrate`) tells
how steps grow with rows that the records do not show, what the two devices take from each other,
what the first step behind a rest takes longer, which messages are late, what those that reach
the target in a step add to it, and how much slower the draft is behind others' work on its core;
how much of that there is was counted (:mod:`bench.core_work`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import minimize

from bench.calibration import SIDES, Calibration, Points
from bench.core_work import CoreWork
from bench.step_fit import TargetStep, fit_cold_start, fit_step, seen_step
from bench.sums import Sums, recorded, replayed
from bench.systems import policy_of
from hippo.simulation.machine import Machine, StepTime
from hippo.simulation.traces import Trace

MOST_REPLAYS = 800
_MESSAGE_SHARE = 0.3  # of what the target's core does between two steps of target-only decoding
_JITTER = 0.1  # of times; it decides who comes first where draft and target nearly meet

# Each parameter with the spread that its starting point is trusted to, in logarithms. What the
# sums of one policy do not tell apart stays near the start.
_SPREADS = {
    "one_row": 0.005,  # known from the baseline
    "several": 0.5,
    "row": 0.3,
    "draft": 0.3,
    "draft_row": 1.0,
    "leg": 0.5,
    "draft_message": 0.5,
    "draft_verdict": 1.0,
    "target_message": 0.7,
    "target_scheduling": 0.2,
    "draft_scheduling": 0.7,
    "target_contention": 0.7,
    "draft_contention": 1.0,
    "target_cold": 0.3,
    "draft_cold": 0.3,
}
# The same, where single forwards were recorded.
_KNOWN_SPREADS = {
    "several": 0.1,
    "row": 0.05,
    "target_message": 0.3,
}
# The same, where the work on the draft's core was counted.
_COUNTED_SPREADS = {"draft_message": 0.1, "draft_verdict": 0.1}
# The same, where the machine was calibrated. What more rows cost is then a factor on what was
# measured ("several" of the target, "draft_row" of the draft), and not a parameter of its own, as
# is what a step behind a rest takes longer.
_CALIBRATED_SPREADS = {
    "several": 0.05,
    "draft": 0.15,
    "draft_row": 0.15,
    "target_contention": 0.2,
    "draft_contention": 0.2,
    "target_cold": 0.1,
    "draft_cold": 0.1,
}
_CALIBRATED_AWAY = ("row",)
_ONLY_CALIBRATED = ("target_cold", "draft_cold")  # sums do not tell them from slower steps
# How well each sum should be met: as a share of the decode time, and of itself.
_OF_DECODE = {"decode": 0.005, "forward": 0.005, "wait": 0.01, "rest": 0.01, "draft_wait": 0.02}
_OF_ITSELF = {"num_forwards": 0.01, "num_drafted": 0.02, "draft_step": 0.05}


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted machine; ``misfit`` is the loss at the end, near 0 where all sums are met."""

    machine: Machine
    misfit: float


def fit(
    records: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    traces: Sequence[Trace],
    *,
    name: str,
    most_replays: int = 0,
    calibration: Calibration | None = None,
    work: CoreWork | None = None,
) -> Fit:
    """The machine on which ``traces`` take what the records say, under the records' policies.

    ``records`` hold each of their clips equally often under each of their systems; of several
    systems the sum counts, so that slower ones count for more. ``baseline`` are target-only answers
    on the same clips: what one row takes alone. ``traces`` are those of all answers that were asked
    for, in that order; those of the records' clips count. Powell's method on the logarithms of the
    parameters, from starting points in the records, with ``most_replays`` (0: the default)
    simulations of all traces; deterministic. Raises ValueError when records and traces are not of
    the same number of tokens, or no policy drafts.
    """
    counted = {record["clip"] for record in records}
    policies = {policy_of(record["system"]) for record in records}
    in_order = sorted(policies, key=lambda policy: (policy.name, policy.gamma))
    num_answers = len(policies) * len(counted)
    goal = recorded(records).scaled(num_answers / len(records))
    goals = [
        (policy, recorded(own).scaled(len(counted) / len(own)))
        for policy in in_order
        if (own := [each for each in records if policy_of(each["system"]) == policy])
    ]
    num_tokens = sum(len(trace.agrees) - 1 for trace in traces if trace.name in counted)
    num_tokens *= len(policies)
    if goal.num_tokens != num_tokens:
        raise ValueError(f"the records have {goal.num_tokens:g} tokens, the traces {num_tokens}")
    if not goal.num_drafted:
        raise ValueError("nothing is to be learnt about the draft from answers without one")
    alone = recorded(baseline)
    step = _target_step(records, baseline, alone, calibration)
    start = _start(goal, alone, num_answers, step)
    frame = _frame(records, name, step)
    known = _KNOWN_SPREADS if step is not None else {}
    if work is not None:
        start["draft_message"] = max(work.message_ms, 0.01)
        start["draft_verdict"] = max(work.verdict_ms, 0.01)
        frame = dataclasses.replace(frame, draft_token_ms=work.token_ms)
        known = known | _COUNTED_SPREADS
    hidden: tuple[str, ...] = _ONLY_CALIBRATED
    if calibration is not None:
        start, frame = _calibrated(start, frame, calibration)
        known, hidden = known | _CALIBRATED_SPREADS, _CALIBRATED_AWAY
    elif all(policy.name == "serial" for policy in policies):
        # While its draft drafts, the target waits: what they take from each other is not seen.
        hidden += ("target_contention", "draft_contention")
    names = [key for key in _SPREADS if key not in hidden]
    origin = np.log([start[key] for key in names])
    spreads = np.array([known.get(key, _SPREADS[key]) for key in names])

    def machine_at(point: np.ndarray) -> Machine:
        return _machine(frame, dict(zip(names, np.exp(point).tolist(), strict=True)))

    def loss(point: np.ndarray) -> float:
        distance = (point - origin) / spreads
        if np.abs(point - origin).max() > 4:  # far from anything real: do not even try
            return 1e6
        machine = machine_at(point)
        value = sum(
            _misfit(goal, replayed(policy, traces, machine, counted=counted))
            for policy, goal in goals
        )
        return value + float(distance @ distance)

    found = minimize(
        loss,
        origin,
        method="Powell",
        options={"maxfev": most_replays or MOST_REPLAYS, "xtol": 1e-3, "ftol": 1e-4},
    )
    return Fit(machine_at(found.x), float(found.fun))


def _target_step(
    records: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    alone: Sums,
    calibration: Calibration | None,
) -> TargetStep | None:
    """The target's forwards, where the records have timelines."""
    if calibration is None:
        return fit_step([*records, *baseline])
    points = calibration.step_ms["target"]
    speed = alone.forward / alone.num_forwards / points[0][1]
    message_ms = _MESSAGE_SHARE * alone.rest / alone.num_forwards
    block_ms = max(message_ms, speed * (calibration.block_ms or 0.0))
    cold_points = _times(speed, calibration.cold_ms["target"])
    cold_start = fit_cold_start(baseline, cold_points[0][1])
    time = seen_step(
        [*records, *baseline],
        points,
        contention=calibration.contention["target"],
        message_ms=block_ms,
        cold_points=cold_points,
        cold_start=cold_start,
    )
    return None if time is None else TargetStep(time, message_ms, cold_start)


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
        "target_scheduling": max((1 - _MESSAGE_SHARE) * alone.rest / alone.num_forwards, 1e-3),
        "draft_scheduling": 0.03,
        "target_contention": 0.05,
        "draft_contention": 0.2,
    }


def _over_one(points: Points) -> Points:
    """What more rows than one add, as it was measured."""
    return tuple((rows, max(0.0, took - points[0][1])) for rows, took in points)


def _times(factor: float, points: Points) -> Points:
    return tuple((rows, factor * took) for rows, took in points)


def _calibrated(
    start: Mapping[str, float], frame: Machine, calibration: Calibration
) -> tuple[dict[str, float], Machine]:
    """Starting points and frame by what was measured; its speed is that of the records' day."""
    one_row_ms = calibration.step_ms["target"][0][1]
    speed = start["one_row"] / one_row_ms
    target = _over_one(calibration.step_ms["target"])
    if not frame.target.points:  # no timeline to find their size by
        target = _times(speed, target)
        frame = dataclasses.replace(frame, target=dataclasses.replace(frame.target, points=target))
    draft = _times(speed, _over_one(calibration.step_ms["draft"]))
    cold = {side: _times(speed, calibration.cold_ms[side]) for side in SIDES}
    frame = dataclasses.replace(
        frame,
        target=dataclasses.replace(frame.target, cold_points=cold["target"]),
        draft=StepTime(one_row_ms=1.0, points=draft, cold_points=cold["draft"]),
        late_share=calibration.late_share,
        late_ms=calibration.late_ms,
        draft_disturbance=calibration.draft_disturbance,
        target_interruption_ms=max(
            0.0, speed * (calibration.block_ms or 0.0) - start["target_message"]
        ),
    )
    known = {
        "several": 1.0,
        "draft": speed * calibration.step_ms["draft"][0][1],
        "draft_row": 1.0,
    }
    for side in SIDES:
        known[f"{side}_contention"] = max(calibration.contention[side], 0.005)
        known[f"{side}_cold"] = 1.0
    return {**start, **known}, frame


def _frame(records: Sequence[Mapping[str, Any]], name: str, step: TargetStep | None) -> Machine:
    """What is read off the records: the prefills, when the draft's may begin, what cached tokens
    cost the target."""

    def mean(key: str) -> float:
        return fmean(record["figures"]["timings_ms"][key] or 0.0 for record in records)

    def first_steps_ms(record: Mapping[str, Any]) -> float:
        # The first block's first token is the prefill's own; each further one took a step.
        pace = policy_of(record["system"]).make().pace
        num_steps = (pace.conservative.min_draft_tokens or pace.block_size) - 1
        return num_steps * float(record["figures"]["timings_ms"]["draft_step"] or 0.0)

    prefill, draft_prefill = mean("target_prefill"), mean("draft_prefill")
    begin = prefill + mean("first_block_after_first_token") - draft_prefill
    return Machine(
        name=name,
        target=step.time if step is not None else StepTime(one_row_ms=1.0),
        draft=StepTime(one_row_ms=1.0),
        target_prefill_ms=prefill,
        draft_prefill_ms=draft_prefill,
        selection_ms=max(0.0, begin - fmean(map(first_steps_ms, records))),
        target_cold_start=step.cold_start if step is not None else 0.0,
        jitter=_JITTER,
    )


def _machine(frame: Machine, parameters: Mapping[str, float]) -> Machine:
    target = dataclasses.replace(frame.target, one_row_ms=parameters["one_row"])
    draft = dataclasses.replace(frame.draft, one_row_ms=parameters["draft"])
    if draft.points:
        target = target.with_rows_scaled(parameters["several"])
        target = target.with_cold_scaled(parameters["target_cold"])
        draft = draft.with_rows_scaled(parameters["draft_row"])
        draft = draft.with_cold_scaled(parameters["draft_cold"])
    else:
        several, row = parameters["several"], parameters["row"]
        target = dataclasses.replace(target, several_ms=several, row_ms=row)
        draft = dataclasses.replace(draft, several_ms=parameters["draft_row"])
    return dataclasses.replace(
        frame,
        target=target,
        draft=draft,
        leg_ms=parameters["leg"],
        draft_message_ms=parameters["draft_message"],
        draft_verdict_ms=parameters["draft_verdict"],
        target_message_ms=parameters["target_message"],
        target_scheduling_ms=parameters["target_scheduling"],
        draft_scheduling_ms=parameters["draft_scheduling"],
        target_contention=parameters.get("target_contention", 0.0),
        draft_contention=parameters.get("draft_contention", 0.0),
    )
