"""The ideal pipeline: how fast the traces of measured answers can be decoded without overhead.

The ideal has the step times and the rejections of the measured answers, and no transport, messages
or scheduling. Three numbers are the best for these very answers: of draft tokens that a forward
verifies at most, of draft tokens that the idle target waits for after a rejection, and of tokens of
the broken run that it verifies instead. Nobody knows them beforehand. Which broken runs fit the
answer again is known from the blocks of the measured answers. The ideal has no branches
(:mod:`hippo.speculation.branches`), so adaptive can be faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    free = machine.ideal()

    def decode_ns(choice: PolicyChoice) -> float:
        return replay_all(choice, traces, free).decode_ns

    best = _Pipeline()
    for name, values in (("first", _FIRST), ("most", _MOST), ("reused", _REUSED)) * 2:
        changes: list[Any] = [{name: value} for value in values]
        best = min((replace(best, **change) for change in changes), key=decode_ns)
    others = (best_gamma(name, traces, free) for name in ("serial", "vpsd"))
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
class MeasuredForward(ForwardTime):
    """The time of a forward by its rows: between two numbers of rows that were measured it lies on
    a straight line; beyond them it stays as it is."""

    rows: tuple[int, ...]
    row_times_ms: tuple[float, ...]

    def ms(self, num_rows: int, context: int) -> float:
        return float(np.interp(num_rows, self.rows, self.row_times_ms))


def measured_machine(records: Sequence[Record]) -> Machine:
    """Returns the step times of one pair from records with timelines, without any overhead.

    A forward takes the median over all forwards of as many rows. The draft's step is the mean over
    adaptive's answers.
    """
    forwards: dict[int, list[float]] = {}
    for record in records:
        for verdict in _verdicts(record)[1:]:  # the first is the prefill
            forwards.setdefault(verdict["rows"], []).append(verdict["forward"])
    steps = [r.figures["timings_ms"]["draft_step"] for r in records if r.system == "adaptive"]
    medians = {rows: statistics.median(found) for rows, found in sorted(forwards.items())}
    return machine_of(medians, statistics.fmean(step for step in steps if step))


def machine_of(forward_ms: Mapping[int, float], draft_ms: float) -> Machine:
    """Returns the machine of a forward's times by rows, and the time of a draft step."""
    times = tuple(forward_ms.values())
    return Machine(
        name="measured",
        target=MeasuredForward(one_row_ms=times[0], rows=tuple(forward_ms), row_times_ms=times),
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
