"""The ideal pipeline: how fast the traces of measured answers can be decoded.

The ideal has the step times and the rejections of the measured answers. It is computed twice:
without transport, messages and scheduling, and with their measured times, which two cores cannot
avoid where gateway and client share the draft's. Three numbers are the best for these very answers:
of draft tokens that a forward verifies at most, of draft tokens that the idle target waits for
after a rejection, and of tokens of the broken run that it verifies instead. Nobody knows them
beforehand. Which broken runs fit the answer again is known from the blocks of the measured answers.
The ideal has no branches (:mod:`hippo.speculation.branches`), so adaptive can be faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from bench.answers.systems import policy_of
from hippo.client.latency import Record
from hippo.lab.simulation.machine import ForwardTime, Machine
from hippo.lab.simulation.replay import (
    PolicyChoice,
    best_gamma,
    compare,
    parse_policies,
    replay_all,
)
from hippo.lab.simulation.traces import Trace, drawn_traces
from hippo.speculation.estimates import PairTimes
from hippo.speculation.policies import MAX_DRAFT_TOKENS, FixedPolicy, Policy, optimistic_pace
from hippo.types import Pace, StepLimits

_FIRST = range(21)  # draft tokens that the idle target waits for; the best is well below
_MOST = (1, 2, 4, 6, 8, 12, 16, 24, MAX_DRAFT_TOKENS)
_REUSED = (0, 2, 4, 8, 16, MAX_DRAFT_TOKENS)


@dataclass(frozen=True, slots=True)
class _Pipeline(PolicyChoice):
    """Always drafts. The target verifies at most ``most`` draft tokens. After a rejection it
    verifies at most ``reused`` tokens of the broken run, or, if there are none, waits for
    ``first`` draft tokens."""

    name: str = "pipeline"
    first: int = 1
    most: int = MAX_DRAFT_TOKENS
    reused: int = 0

    def new_policy(self, times: PairTimes | None = None) -> Policy:
        pace = optimistic_pace(self.most)
        limits = pace.optimistic
        first = StepLimits(min(self.first, self.most), self.most, limits.wait_ns)
        return FixedPolicy(Pace(limits, first, pace.max_ahead, pace.block_size, self.reused))


def ideal_speedup(traces: Sequence[Trace], machine: Machine) -> float:
    """Returns the decode speedup of the ideal pipeline over target-only, on these traces."""

    def decode_ns(choice: PolicyChoice) -> float:
        return replay_all(choice, traces, machine).decode_ns

    best = _Pipeline()
    for name, values in (("first", _FIRST), ("most", _MOST), ("reused", _REUSED)) * 2:
        changes: list[Any] = [{name: value} for value in values]
        best = min((replace(best, **change) for change in changes), key=decode_ns)
    others = (best_gamma(name, traces, machine) for name in ("serial", "vpsd"))
    return decode_ns(PolicyChoice("off")) / min(map(decode_ns, (best, *others)))


def simulated_lines(
    machine: Machine, shares: Sequence[float], *, num_traces: int = 12
) -> dict[str, list[float]]:
    """Returns the decode speedups that the simulator predicts for serial and vpsd at their best
    lengths and for adaptive, at each share of independent agreement, over that many answers."""
    lines: dict[str, list[float]] = {"serial": [], "vpsd": [], "adaptive": []}
    for share in shares:
        traces = drawn_traces(agreement=share, num_traces=num_traces, num_tokens=120)
        for row in compare(parse_policies("serial:best,vpsd:best,adaptive"), traces, machine):
            lines[row.policy.name].append(row.decode_speedup)
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredForward:
    """The ForwardCost of measured forwards: between two numbers of rows that were measured it lies
    on a straight line; beyond them it stays as it is."""

    rows: tuple[int, ...]
    row_times_ms: tuple[float, ...]

    def ms(self, num_rows: int, context: int) -> float:
        return float(np.interp(num_rows, self.rows, self.row_times_ms))


def measured_machine(records: Sequence[Record]) -> Machine:
    """Returns the times of one pair from records with timelines, those of serial among them.

    A forward takes the mean over all forwards of as many rows, fitted so that no forward takes less
    than one of fewer rows (isotonic regression). Without the fit the ideal would choose numbers of
    rows that few forwards had, in moments when the machine was fast. The draft's step is the mean
    over all tokens of adaptive's answers. A message takes a quarter of the time of a round of
    serial decoding in which neither model computes: four messages pass in it.
    """
    forwards: dict[int, list[float]] = {}
    for record in records:
        for verdict in _verdicts(record)[1:]:  # the first is the prefill
            forwards.setdefault(verdict["rows"], []).append(verdict["forward"])
    rows = sorted(forwards)
    times = _rising_means([forwards[each] for each in rows])
    num_tokens, drafting_ms = _drafted(records, "adaptive")
    machine = machine_of(dict(zip(rows, times, strict=True)), drafting_ms / num_tokens)
    verdicts = [verdict for record in records for verdict in _verdicts(record)[1:]]
    return replace(
        machine,
        leg_ms=_leg_ms(records),
        target_scheduling_ms=statistics.fmean(verdict["between"] for verdict in verdicts),
    )


def _drafted(records: Iterable[Record], policy: str) -> tuple[int, float]:
    """Returns the draft tokens that a policy's answers received after their first token, and the
    milliseconds in which they were drafted."""
    blocks = [
        block
        for record in records
        if policy_of(record.system).name == policy
        for block in record.figures["timeline_ms"]["blocks"]
        if block["at"] > _verdicts(record)[0]["at"]
    ]
    drafting_ms = sum(block["tokens"] * block["step"] for block in blocks)
    return sum(block["tokens"] for block in blocks), drafting_ms


def _leg_ms(records: Sequence[Record]) -> float:
    verdicts = [
        verdict
        for record in records
        if policy_of(record.system).name == "serial"
        for verdict in _verdicts(record)[1:]
    ]
    _, drafting_ms = _drafted(records, "serial")
    idle_ms: float = sum(verdict["wait"] for verdict in verdicts) - drafting_ms
    return max(idle_ms, 0.0) / (4 * len(verdicts))


def _rising_means(samples: Sequence[Sequence[float]]) -> list[float]:
    """Returns the means of the samples, those that fall replaced by common ones so that none is
    below an earlier one: the rising numbers with the least squared distance to all samples."""
    places = range(len(samples))

    def mean(first: int, last: int) -> float:
        return statistics.fmean(chain.from_iterable(samples[first : last + 1]))

    return [
        max(min(mean(first, last) for last in places[place:]) for first in places[: place + 1])
        for place in places
    ]


def machine_of(forward_ms: Mapping[int, float], draft_ms: float) -> Machine:
    """Returns the machine of a forward's times by rows, and the time of a draft step."""
    times = tuple(forward_ms.values())
    return Machine(
        name="measured",
        target=MeasuredForward(rows=tuple(forward_ms), row_times_ms=times),
        draft=ForwardTime(one_row_ms=draft_ms),
    )


def trace_of(record: Record, others: Iterable[Record] = ()) -> Trace:
    """Returns where the draft agreed with the target in an answer under a policy that always
    drafts ahead, as `vpsd` does, and which broken runs fitted in it and in ``others``, which are
    the same answer under other policies."""
    agrees: list[bool] = []
    for verdict in _verdicts(record):
        agrees += [True] * verdict["tokens"]
        if verdict["is_rejection"]:
            agrees[-1] = False
    fits: dict[int, bool] = {}
    for each in (record, *others):
        fits |= _broken_runs_that_fit(each)
    return Trace(tuple(agrees), name=record.clip, fits=fits)


def _broken_runs_that_fit(record: Record) -> dict[int, bool]:
    """Returns for each wrong draft token, by its index, whether the draft's next token was right;
    of runs that went on after it."""
    runs: dict[int, dict[int, int]] = {}  # by epoch; token ids by index
    for block in record.figures["timeline_ms"]["blocks"]:
        ids = enumerate(block["token_ids"], block["start"])
        runs.setdefault(block["epoch"], {}).update(ids)
    answer = record.answer.token_ids
    fits = {}
    for run in runs.values():
        wrong = next((k for k in sorted(run) if k < len(answer) and run[k] != answer[k]), None)
        if wrong is not None and wrong + 1 in run and wrong + 1 < len(answer):
            fits[wrong] = run[wrong + 1] == answer[wrong + 1]
    return fits


def _verdicts(record: Record) -> Sequence[Mapping[str, Any]]:
    verdicts: Sequence[Mapping[str, Any]] = record.figures["timeline_ms"]["verdicts"]
    return verdicts
