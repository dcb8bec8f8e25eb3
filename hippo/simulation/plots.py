"""Speedup curves as SVG; needs matplotlib, which is not among what a service needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hippo.errors import HippoError
from hippo.simulation.sweeps import Sweep

_COLOURS = ("#c2410c", "#2f6f9f", "#4d7c4f", "#e9a13b", "#7fb2d6", "#9aa39a")
_LABELS = {
    "acceptance": "share of tokens on which the draft agrees",
    "ratio": "step time of the target over the draft's",
    "delay": "one message one way, ms",
}


def draw_sweeps(sweeps: Sequence[Sweep], goal: Path, *, title: str) -> None:
    """One panel a sweep, side by side, a line a policy. Raises HippoError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("svg")
        matplotlib.rcParams["svg.hashsalt"] = "hippo"
        from matplotlib import pyplot
    except ImportError:
        raise HippoError(
            "a plot needs matplotlib: pip install 'hippo-serve[dev]' (or leave --plot out)"
        ) from None
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
