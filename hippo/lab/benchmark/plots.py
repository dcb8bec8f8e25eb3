"""Plots of measurements. Needs matplotlib, which the services do not install."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hippo.base.extras import needs_extra
from hippo.client.latency import TARGET_ONLY
from hippo.errors import InvalidRequestError

SUFFIXES = (".svg", ".png")
_GREY = "#777777"
COLOURS = ("#2f6f9f", "#c58a2c", "#8a5fa8", "#4d7c4f", "#c2410c")

Row = Mapping[str, Any]


def check_plot(goal: Path) -> None:
    """Raises HippoError if ``goal`` has no known suffix or matplotlib is not installed."""
    if goal.suffix.lower() not in SUFFIXES:
        raise InvalidRequestError(f"{goal}: a plot's name ends in {' or '.join(SUFFIXES)}")
    new_figure(1, 1)


def draw_speedups(rows: Sequence[Row], goal: Path, *, title: str) -> None:
    """Draws decode and end-to-end speedups with intervals; ``rows`` are of ``summarise``."""
    shown = list(reversed([row for row in rows if row["system"] != TARGET_ONLY]))
    figure = new_figure(8.4, 0.42 * len(shown) + 1.5)
    axes = figure.subplots()
    for offset, key, label, colour in (
        (0.2, "decode_speedup", "decode (first token to last)", "#2f6f9f"),
        (-0.2, "end_to_end_speedup", "end to end (both prefills included)", "#9fc3dd"),
    ):
        means = [row[key]["mean"] for row in shown]
        errors = [
            [mean - row[key]["low"] for mean, row in zip(means, shown, strict=True)],
            [row[key]["high"] - mean for mean, row in zip(means, shown, strict=True)],
        ]
        places = [index + offset for index in range(len(shown))]
        axes.barh(places, means, 0.38, xerr=errors, label=label, color=colour, capsize=2)
        for place, mean in zip(places, means, strict=True):
            axes.text(0.04, place, f"{mean:.2f}×", va="center", fontsize=8, color="black")
    axes.axvline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(shown)), [row["system"] for row in shown])
    axes.set_xlabel("times as fast as target-only decoding on the same device")
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(fontsize=8, loc="upper right")
    finish(figure, goal)


def draw_answers(
    system: str, values: Mapping[str, Sequence[float]], goal: Path, *, title: str
) -> None:
    """Draws the cumulative distribution of each quantity of one system's answers, a panel each."""
    figure = new_figure(4.3 * len(values) + 0.6, 3.6)
    panels = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for axes, (label, numbers) in zip(panels, values.items(), strict=True):
        ordered = sorted(numbers)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        # Begins at 0 at the least value, so that even a single answer is a line.
        places = [ordered[0], *ordered]
        axes.step(places, [0.0, *shares], where="post", color=COLOURS[0], label=system)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
    panels[0].set_ylabel("share of answers")
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    finish(figure, goal)


def draw_load(lines: Sequence[Row], goal: Path, *, title: str) -> None:
    """Draws throughput, time per token and time to first token over the number of clients."""
    figure = new_figure(13.2, 3.6)
    panels = figure.subplots(1, 3)
    quantities: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("tokens a second, all clients", lambda line: float(line["tokens_per_s"])),
        ("ms a token, median", lambda line: float(line["tpot_ms"]["p50"])),
        ("ms to the first token, median", lambda line: float(line["ttft_ms"]["p50"])),
    )
    colours = _colours([line["system"] for line in lines])
    ticks = sorted({line["num_clients"] for line in lines})
    for axes, (label, value) in zip(panels, quantities, strict=True):
        for system in dict.fromkeys(line["system"] for line in lines):
            own = [line for line in lines if line["system"] == system]
            axes.plot(
                [line["num_clients"] for line in own],
                [value(line) for line in own],
                label=system,
                color=colours[system],
                marker="o",
                markersize=4,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("clients")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    finish(figure, goal)


def _colours(systems: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each name: grey for target-only."""
    others = [name for name in dict.fromkeys(systems) if name != TARGET_ONLY]
    return {TARGET_ONLY: _GREY} | dict(zip(others, itertools.cycle(COLOURS), strict=False))


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure; sizes are inches. Raises HippoError without matplotlib."""
    with needs_extra("plots", "a plot", or_else="leave --plot out"):
        import matplotlib
        from matplotlib.figure import Figure
    matplotlib.rcParams["svg.hashsalt"] = "hippo"  # equal figures give equal files
    return Figure(figsize=(width, height))


def finish(figure: Any, goal: Path) -> None:
    """Writes a figure. Raises InvalidRequestError if the file cannot be written."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    kind = goal.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else {}
    try:
        figure.savefig(goal, format=kind, dpi=150, metadata=metadata)
    except OSError as error:
        raise InvalidRequestError(f"{goal} cannot be written: {error.strerror}") from None
