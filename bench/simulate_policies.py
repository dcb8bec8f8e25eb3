"""Judges the policies in virtual time: ``python -m bench.simulate_policies``.

The three cores run over traces of agreement (which of the target's tokens the draft would have
proposed) with the step times of a machine; what is printed is the decode-only speedup over
target-only decoding on the same traces. Agreement comes in bursts: a hidden state is either easy
or hard for some tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hippo.simulation.traces import agreement_trace
from hippo.speculation.policies import Policy, make_policy
from hippo.speculation.simulator import Costs, Outcome, Simulation

__all__ = ["Machine", "agreement_trace", "mean_speedup", "simulate"]

_MS = 1_000_000
_GAMMAS = (2, 3, 4, 5, 6, 7, 9, 12)
_VPSD_GAMMAS = (3, 5, 7)

# Cost of a target forward by rows, relative to one row.
ROW_COSTS = {
    "measured": ((1, 1.0), (4, 1.38), (8, 1.55), (16, 2.05), (32, 3.4)),
    "flat": ((1, 1.0), (16, 1.15), (32, 1.4)),
    "steep": ((1, 1.0), (4, 1.6), (8, 2.2), (16, 3.6), (32, 6.4)),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Step times and transport of one set-up."""

    target_ms: float = 10.0
    step_ratio: float = 8.3
    row_costs: str = "measured"
    leg_ms: float = 0.25
    message_ms: float = 0.065  # CPU a message and side
    noise: float = 0.05  # spread of step times

    def costs(self, rng: random.Random) -> Costs:
        points = ROW_COSTS[self.row_costs]
        draft_ns = self.target_ms * _MS / self.step_ratio

        def jitter() -> float:
            return rng.lognormvariate(0.0, self.noise) if self.noise else 1.0

        return Costs(
            target_ns=lambda n, context: self.target_ms * _MS * interpolate(points, n) * jitter(),
            draft_ns=lambda n, context: draft_ns * (1 + 0.05 * (n - 1)) * jitter(),
            leg_ns=lambda: self.leg_ms * _MS * (0.8 + 0.4 * rng.random()),
            draft_message_ns=3 * self.message_ms * _MS,  # the gateway is on the draft's core
            target_message_ns=self.message_ms * _MS,
        )


def interpolate(points: Sequence[tuple[int, float]], num_rows: int) -> float:
    """Linear between the points and beyond the last."""
    for (n0, c0), (n1, c1) in itertools.pairwise(points):
        if num_rows <= n1 or (n1, c1) == points[-1]:
            return c0 + (c1 - c0) * (num_rows - n0) / (n1 - n0)
    raise AssertionError("points ascend")


def simulate(policy: Policy, trace: Sequence[bool], machine: Machine, seed: int) -> Outcome:
    """One sequence as long as the trace."""

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
    make: Callable[[], Policy], traces: Sequence[Sequence[bool]], machine: Machine
) -> float:
    """Decode time of target-only over that of the policy, both summed over the traces."""

    def decode_ns(make: Callable[[], Policy]) -> float:
        return sum(
            simulate(make(), trace, machine, seed).decode_ns for seed, trace in enumerate(traces)
        )

    return decode_ns(lambda: make_policy("off", gamma=1, max_draft_tokens=1)) / decode_ns(make)


def row(machine: Machine, agreement: float, burstiness: float, num_traces: int) -> dict[str, float]:
    """Speedups of all policies at one point."""
    traces = [
        agreement_trace(random.Random(seed), 128, agreement, burstiness)
        for seed in range(num_traces)
    ]

    def speedup(name: str, gamma: int = 5) -> float:
        return mean_speedup(
            lambda: make_policy(name, gamma=gamma, max_draft_tokens=16), traces, machine
        )

    serial = {gamma: speedup("serial", gamma) for gamma in _GAMMAS}
    best = max(serial, key=lambda gamma: serial[gamma])
    return {
        "serial": serial[best],
        "gamma": best,
        **{f"vpsd{gamma}": speedup("vpsd", gamma) for gamma in _VPSD_GAMMAS},
        "optimistic": speedup("optimistic"),
        "conservative": speedup("conservative"),
        "adaptive": speedup("adaptive"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--traces", type=int, default=12, help="sequences of 128 tokens a point")
    parser.add_argument("--ratios", type=float, nargs="+", default=[5, 8.3, 12])
    parser.add_argument("--agreements", type=float, nargs="+", default=[0, 0.6, 0.8, 0.9, 0.95])
    parser.add_argument("--row-costs", nargs="+", choices=ROW_COSTS, default=["measured"])
    parser.add_argument("--burstiness", type=float, default=0.5)
    parser.add_argument("--json", type=Path, help="write the table here as well")
    args = parser.parse_args()
    results = []
    out = sys.stdout
    header = False
    for row_costs in args.row_costs:
        for ratio in args.ratios:
            for agreement in args.agreements:
                machine = Machine(step_ratio=ratio, row_costs=row_costs)
                figures = row(machine, agreement, args.burstiness, args.traces)
                if not header:
                    header = True
                    out.write(f"{'rows':9}{'ratio':>6}{'agree':>7}")
                    out.write("".join(f"{name:>13}" for name in figures))
                    out.write(f"{'vs serial':>11}\n")
                out.write(f"{row_costs:9}{ratio:6.1f}{agreement:7.2f}")
                out.write("".join(f"{value:13.2f}" for value in figures.values()))
                out.write(f"{figures['adaptive'] / figures['serial']:11.2f}\n")
                out.flush()
                results.append(
                    {"row_costs": row_costs, "step_ratio": ratio, "agreement": agreement, **figures}
                )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
