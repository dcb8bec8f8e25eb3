"""Speedups over one quantity: acceptance, the ratio of step times, or the network's delay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hippo.simulation.machine import Machine
from hippo.simulation.replay import PolicyChoice, compare
from hippo.simulation.traces import Trace

Quantity = Literal["acceptance", "ratio", "delay"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

VALUES: dict[Quantity, tuple[float, ...]] = {
    "acceptance": (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98),
    "ratio": (1.5, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    "delay": (0, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 5),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One value of the quantity: the decode speedup of each policy and the gammas chosen."""

    value: float
    speedups: dict[str, float]
    gammas: dict[str, int]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A quantity swept on one machine."""

    quantity: Quantity
    machine: Machine
    points: tuple[Point, ...]


def with_ratio(machine: Machine, ratio: float) -> Machine:
    """The machine with a draft whose step takes 1 / ``ratio`` of the target's single row.

    Both at a context of 0; what the draft's step depends on is scaled with it.
    """
    scale = machine.target.one_row_ms / ratio / machine.draft.one_row_ms
    return dataclasses.replace(machine, draft=machine.draft.scaled(scale))


def sweep(
    quantity: Quantity,
    machine: Machine,
    *,
    policies: Sequence[PolicyChoice],
    traces_at: Callable[[float], Sequence[Trace]],
    acceptance: float,
    values: Sequence[float] = (),
    advance: Callable[[], None] = lambda: None,
) -> Sweep:
    """Compares the policies at each value; ``advance`` is called after each.

    ``traces_at`` gives the traces of an acceptance, ``acceptance`` the one that stays when another
    quantity is swept. A delay is of one message one way, in milliseconds.
    """
    points = []
    for value in values or VALUES[quantity]:
        changed, rate = machine, acceptance
        if quantity == "acceptance":
            rate = value
        elif quantity == "ratio":
            changed = with_ratio(machine, value)
        else:
            changed = dataclasses.replace(machine, leg_ms=value)
        rows = compare(policies, traces_at(rate), changed)
        names = [_series(wanted) for wanted in policies]
        points.append(
            Point(
                value=value,
                speedups={n: row.decode_speedup for n, row in zip(names, rows, strict=True)},
                gammas={
                    n: row.policy.gamma
                    for n, row in zip(names, rows, strict=True)
                    if row.policy.name in ("serial", "vpsd")
                },
            )
        )
        advance()
    return Sweep(quantity, machine, tuple(points))


def _series(policy: PolicyChoice) -> str:
    return policy.title if policy.gamma else f"{policy.name}, best γ"
