"""Accepted lengths of an agreement trace, by the discrete-event simulator.

A trace says for each token of the target's output whether the draft, fed the target's own tokens
up to there, proposes the same one. Under greedy decoding that settles every verdict, so the
policies' cores can run on it in virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.simulate_policies import Machine
from hippo.speculation.policies import MAX_DRAFT_TOKENS, Policy, make_policy
from hippo.speculation.simulator import Simulation


@dataclass(frozen=True, slots=True)
class Readings:
    """Both readings of "accepted tokens" and the decode-only speedup in virtual time."""

    mean_tokens_per_forward: float  # 1 + accepted / forwards
    mean_run_length: float  # tokens settled between two rejections
    decode_speedup: float


@dataclass(slots=True)
class Totals:
    """Sums over traces, so that long answers count for more."""

    num_forwards: int = 0
    num_accepted: int = 0
    num_runs: int = 0
    run_tokens: int = 0
    decode_ns: float = 0.0
    alone_ns: float = 0.0

    def readings(self) -> Readings:
        """Raises ZeroDivisionError when no trace was added."""
        return Readings(
            mean_tokens_per_forward=1 + self.num_accepted / self.num_forwards,
            mean_run_length=self.run_tokens / self.num_runs,
            decode_speedup=self.alone_ns / self.decode_ns,
        )


def read_traces(
    traces: Sequence[Sequence[bool]], *, policy: str, gamma: int, machine: Machine
) -> Readings:
    """The readings of a policy over traces, on a machine with those step times.

    Step times do not vary; transport and messages take what ``machine`` says. Traces of a single
    token, which the prefill settles, are left out.
    """
    totals = Totals()
    for trace in traces:
        if len(trace) < 2:
            continue
        _add(totals, trace, policy, gamma, machine)
        totals.alone_ns += (len(trace) - 1) * machine.target_ms * 1e6
    return totals.readings()


def _add(totals: Totals, trace: Sequence[bool], policy: str, gamma: int, machine: Machine) -> None:
    target, draft = _token_functions(trace)
    outcome = Simulation(
        target=target,
        draft=draft,
        policy=_make(policy, gamma),
        costs=machine.costs(random.Random(0)),
        max_tokens=len(trace),
    ).run()
    stats = outcome.stats
    totals.num_forwards += stats.num_forwards
    totals.num_accepted += stats.num_accepted_tokens
    runs = [*stats.run_lengths, *([stats.open_run_length] if stats.open_run_length else [])]
    totals.num_runs += len(runs)
    totals.run_tokens += sum(runs)
    totals.decode_ns += outcome.decode_ns


def _token_functions(
    trace: Sequence[bool],
) -> tuple[Callable[[Sequence[int]], int], Callable[[Sequence[int]], int]]:
    def target(history: Sequence[int]) -> int:
        return len(history) % 997

    def draft(history: Sequence[int]) -> int:
        return target(history) + (0 if trace[len(history)] else 1)

    return target, draft


def _make(policy: str, gamma: int) -> Policy:
    return make_policy(policy, gamma=gamma, max_draft_tokens=MAX_DRAFT_TOKENS)
