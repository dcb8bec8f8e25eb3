"""Policies in virtual time: machines, traces of agreement, speedups over target-only decoding."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hippo.lab.simulation.devices import Costs, Outcome
from hippo.lab.simulation.simulator import Simulation
from hippo.speculation.policies import Policy, make_policy

_MS = 1_000_000

# Cost of a target forward by rows, relative to one row.
ROW_COSTS = {
    "measured": ((1, 1.0), (4, 1.38), (8, 1.55), (16, 2.05), (32, 3.4)),
    "flat": ((1, 1.0), (16, 1.15), (32, 1.4)),
    "steep": ((1, 1.0), (4, 1.6), (8, 2.2), (16, 3.6), (32, 6.4)),
}


@dataclass(frozen=True, slots=True)
class VirtualMachine:
    """A target of 10 ms a step and a draft ``step_ratio`` times as fast, both with 5 % of noise."""

    step_ratio: float = 8.3

    def costs(self, rng: random.Random) -> Costs:
        target_ns, draft_ns = 10.0 * _MS, 10.0 * _MS / self.step_ratio

        def noise() -> float:
            return rng.lognormvariate(0.0, 0.05)

        return Costs(
            target_ns=lambda n, context: target_ns * row_cost("measured", n) * noise(),
            draft_ns=lambda n, context: draft_ns * (1 + 0.05 * (n - 1)) * noise(),
            leg_ns=lambda: 0.25 * _MS * (0.8 + 0.4 * rng.random()),
            draft_message_ns=0.2 * _MS,  # the gateway is on the draft's core
            target_message_ns=0.065 * _MS,
        )


def row_cost(name: str, num_rows: int) -> float:
    """By ``ROW_COSTS``: linear between the points and beyond the last."""
    points = ROW_COSTS[name]
    for (n0, c0), (n1, c1) in itertools.pairwise(points):
        if num_rows <= n1 or (n1, c1) == points[-1]:
            return c0 + (c1 - c0) * (num_rows - n0) / (n1 - n0)
    raise AssertionError("points ascend")


def simulate(policy: Policy, trace: Sequence[bool], machine: VirtualMachine, seed: int) -> Outcome:
    def target(history: Sequence[int]) -> int:
        return len(history) * 7 % 1000

    def draft(history: Sequence[int]) -> int:
        return target(history) + (not trace[len(history)])

    return Simulation(
        target=target,
        draft=draft,
        policy=policy,
        costs=machine.costs(random.Random(seed)),
        max_tokens=len(trace),
    ).run()


def mean_speedup(
    make: Callable[[], Policy], traces: Sequence[Sequence[bool]], machine: VirtualMachine
) -> float:
    """Decode time of target-only over that of the policy, both summed over the traces."""

    def decode_ns(make: Callable[[], Policy]) -> float:
        return sum(
            simulate(make(), trace, machine, seed).decode_ns for seed, trace in enumerate(traces)
        )

    return decode_ns(lambda: make_policy("off", gamma=1, max_draft_tokens=1)) / decode_ns(make)
