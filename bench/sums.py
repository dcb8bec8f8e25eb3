"""What recorded and simulated answers take in sum, so that one can be held against the other."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hippo.simulation.machine import Machine
from hippo.simulation.replay import PolicyChoice, replay
from hippo.simulation.traces import Trace
from hippo.speculation.estimates import PairTimes
from hippo.speculation.simulator import Outcome

_MS = 1e6
_ROW_CLASSES = (1, 4, 9, 17)  # forwards of similar size: the most rows of each class but the last
_WARM_UP_TOKENS = 24  # of the answer that `hippo.benchmark.latency` asks for before it measures


@dataclass(slots=True)
class Sums:
    """Over answers; times in milliseconds."""

    num_tokens: float = 0  # decoded: all but each answer's first
    num_forwards: float = 0
    num_draft_tokens: float = 0  # rows that held one
    num_drafted: float = 0
    decode: float = 0.0
    forward: float = 0.0
    wait: float = 0.0  # of the target for the draft
    draft_wait: float = 0.0
    draft_step: float = 0.0  # the draft's running mean at the end of each answer
    by_rows: dict[int, tuple[float, float]] = field(default_factory=dict)  # class: count, time

    @property
    def rest(self) -> float:
        """When the target's device neither worked nor waited for the draft."""
        return self.decode - self.forward - self.wait

    def scaled(self, factor: float) -> Sums:
        """All of it so many times: of all runs of a measurement, the mean run."""
        return Sums(
            **{
                each.name: factor * getattr(self, each.name)
                for each in dataclasses.fields(self)
                if each.name != "by_rows"
            },
            by_rows={
                row_class: (factor * count, factor * total)
                for row_class, (count, total) in self.by_rows.items()
            },
        )

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


def replayed(
    policy: PolicyChoice,
    traces: Sequence[Trace],
    machine: Machine,
    *,
    counted: Collection[str] | None = None,
    seed: int = 0,
) -> Sums:
    """The sums of the answers that the traces' names in ``counted`` stand for (None: of all).

    ``traces`` are all clips in the order in which they were asked about. What adaptive measures it
    keeps, so it answers them all, and the first one's beginning before, as the benchmark does.
    """
    names = [trace.name for trace in traces] if counted is None else counted
    return replayed_under({policy: names}, traces, machine, seed=seed)


def replayed_under(
    asked: Mapping[PolicyChoice, Collection[str]],
    traces: Sequence[Trace],
    machine: Machine,
    *,
    seed: int = 0,
) -> Sums:
    """As ``replayed``, of several policies, each with the traces that count under it."""
    outcomes = []
    for policy, counted in asked.items():
        times = PairTimes()
        is_learning = policy.name == "adaptive"
        if is_learning:
            replay(policy, _beginning(traces[0]), machine, seed=seed, times=times)
        for number, trace in enumerate(traces):
            is_counted = trace.name in counted
            if is_counted or is_learning:
                outcome = replay(policy, trace, machine, seed=1000 * seed + number, times=times)
                outcomes += [outcome] * is_counted
    return simulated(outcomes)


def _beginning(trace: Trace) -> Trace:
    most = min(_WARM_UP_TOKENS, len(trace.agrees))
    words = trace.words
    if words is not None:
        words = dataclasses.replace(
            words, token_ids=words.token_ids[:most], draft_ids=words.draft_ids[:most]
        )
    return dataclasses.replace(trace, agrees=trace.agrees[:most], words=words)
