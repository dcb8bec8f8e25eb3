"""Plots of predictions of ``hippo simulate``: speedups of the papers' pairs over the acceptance
rate, the ratio of step times, and the network's delay. Nothing in them is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
from rich.console import Console

from bench.base.environment import ROOT
from hippo.client.tables import progress_bar
from hippo.lab.simulation.machine import ForwardCost, Machine
from hippo.lab.simulation.pairs import ModelPair, find_pair
from hippo.lab.simulation.replay import PolicyChoice, compare, parse_policies
from hippo.lab.simulation.traces import Trace, drawn_traces

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "hippo"
from matplotlib import pyplot  # noqa: E402

PICTURES = ("qwen-7b-72b", "qwen-7b-32b", "llava-0.5b-7b")
POLICIES = "serial:best,vpsd:best,adaptive"
Quantity = Literal["acceptance", "ratio", "delay"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

VALUES: dict[Quantity, tuple[float, ...]] = {
    "acceptance": (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98),
    "ratio": (1.5, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    "delay": (0, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 5),
}


@dataclass(frozen=True, slots=True)
class Point:
    """Decode speedup and chosen gamma of each policy at one value of the quantity."""

    value: float
    speedups: dict[str, float]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Predictions over several values of a quantity on one machine."""

    quantity: Quantity
    machine: Machine
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class ScaledTime:
    """A ForwardCost times a factor."""

    cost: ForwardCost
    factor: float

    def ms(self, num_rows: int, context: int) -> float:
        return self.factor * self.cost.ms(num_rows, context)


def with_ratio(machine: Machine, ratio: float) -> Machine:
    """Returns the machine with a draft step of 1 / ``ratio`` of the target's step.

    The ratio is that of one row at a context of 0; all parts of the draft's step are scaled.
    """
    factor = machine.target.ms(1, 0) / ratio / machine.draft.ms(1, 0)
    return dataclasses.replace(machine, draft=ScaledTime(machine.draft, factor))


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
    """Compares the policies at each value of ``quantity``; calls ``advance`` after each.

    ``traces_at`` returns the traces of an acceptance rate. ``acceptance`` is the rate while another
    quantity varies. A delay is the milliseconds of a message, one way.
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
            )
        )
        advance()
    return Sweep(quantity, machine, tuple(points))


def _series(policy: PolicyChoice) -> str:
    return policy.title if policy.gamma else f"{policy.name}, best γ"


_COLOURS = ("#c2410c", "#2f6f9f", "#4d7c4f", "#e9a13b", "#7fb2d6", "#9aa39a")
_LABELS = {
    "acceptance": "share of tokens on which the draft agrees",
    "ratio": "step time of the target over the draft's",
    "delay": "one message one way, ms",
}


def draw_sweeps(sweeps: Sequence[Sweep], goal: Path, *, title: str) -> None:
    """Draws a panel per sweep, side by side, with a line per policy."""
    figure, every = pyplot.subplots(
        1, len(sweeps), figsize=(4.3 * len(sweeps) + 0.6, 3.9), sharey=True, squeeze=False
    )
    for axes, sweep in zip(every[0], sweeps, strict=True):
        _panel(axes, sweep)
    every[0][0].set_ylabel("times as fast as target-only decoding")
    every[0][0].legend(fontsize=8, loc="best", frameon=False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(goal, metadata={"Date": None})
    pyplot.close(figure)


def _panel(axes: Any, sweep: Sweep) -> None:
    values = [point.value for point in sweep.points]
    for colour, name in zip(_COLOURS, sweep.points[0].speedups, strict=False):
        speedups = [point.speedups[name] for point in sweep.points]
        axes.plot(values, speedups, "-o", markersize=3, color=colour, label=name)
    axes.axhline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(_LABELS[sweep.quantity])
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)


def write_pictures(console: Console) -> None:
    """Writes a plot per pair."""
    with progress_bar(console) as progress:
        total = len(PICTURES) * sum(map(len, VALUES.values()))
        task = progress.add_task("sweeps", total=total)
        for name in PICTURES:
            pair = find_pair(name)
            machine = pair.machine()

            def traces_at(rate: float, pair: ModelPair = pair) -> list[Trace]:
                return drawn_traces(
                    agreement=rate,
                    num_traces=12,
                    num_tokens=256,
                    burstiness=0.5,
                    num_prompt_tokens=pair.num_prompt_tokens,
                    num_draft_prompt_tokens=pair.num_draft_tokens,
                )

            sweeps = [
                sweep(
                    quantity,
                    machine,
                    policies=parse_policies(POLICIES),
                    traces_at=traces_at,
                    acceptance=0.9,
                    advance=lambda: progress.advance(task),
                )
                for quantity in QUANTITIES
            ]
            goal = ROOT / "docs" / f"predicted-{name}.svg"
            draw_sweeps(sweeps, goal, title=f"predicted: {machine.name}")
            console.print(f"written to {goal}", highlight=False, soft_wrap=True)
