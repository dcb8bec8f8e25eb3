"""Time a token along an answer: windows, their slope, a table and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True, slots=True)
class Windows:
    """Milliseconds a token in consecutive windows of an answer, and their trend."""

    width: int  # tokens
    ms: tuple[float, ...]
    slope: float  # ms a token, over 1,000 tokens of answer
    error: float  # half of the slope's 95 % interval

    @property
    def mean(self) -> float:
        """Of the windows."""
        return statistics.fmean(self.ms)


def windows_of(verdicts: Sequence[Mapping[str, Any]], *, width: int) -> Windows:
    """Of a timeline's verdicts; the first one, the prefill's, is where time begins."""
    ends: list[float] = []  # when token k was there; those of a verdict evenly since the last
    for verdict in verdicts:
        began, num_tokens = (ends[-1] if ends else verdict["at"]), verdict["tokens"]
        step = (verdict["at"] - began) / num_tokens
        ends += [began + step * (position + 1) for position in range(num_tokens)]
    ms = tuple(
        (ends[start + width] - ends[start]) / width for start in range(0, len(ends) - width, width)
    )
    slope, error = trend([width * (index + 0.5) / 1e3 for index in range(len(ms))], ms)
    return Windows(width, ms, slope, error)


def fastest_forwards(verdicts: Sequence[Mapping[str, Any]], *, width: int) -> list[float]:
    """The fastest one-row forward, in milliseconds, of each ``width`` of them: what a step takes
    when nothing else wants the processor."""
    forwards = [verdict["forward"] for verdict in verdicts[1:] if verdict["rows"] == 1]
    return [
        min(forwards[start : start + width]) for start in range(0, len(forwards) - width + 1, width)
    ]


def trend(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Least squares: the slope and half of its 95 % interval (Student's; nan below 3 points)."""
    if len(xs) < 3:
        return math.nan, math.nan
    slope, offset = statistics.linear_regression(xs, ys)
    rest = sum((y - offset - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    freedom = len(xs) - 2
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else 2.0
    return slope, quantile * math.sqrt(rest / freedom / spread)


def show(
    console: Console,
    answers: Mapping[str, Sequence[Mapping[str, Any]]],
    windows: Mapping[str, Sequence[Windows]],
) -> None:
    """A line an answer, and the first question's time to its first token."""
    first = answers["first"][0]
    console.print(f"first question: {first['ttft_s']:.1f} s to the first token", highlight=False)
    table = Table()
    for column in (
        "system", "tokens", "TTFT s", "ms/token", "windows, ms/token", "trend, ms/token over 1,000",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, runs in windows.items():
        for answer, window in zip(answers[name], runs, strict=True):
            if name != "first":
                table.add_row(
                    name,
                    str(answer["num_tokens"]),
                    f"{answer['ttft_s']:.2f}",
                    f"{answer['ms_per_token']:.2f}",
                    " ".join(f"{ms:.2f}" for ms in window.ms),
                    f"{window.slope:+.2f} ± {window.error:.2f}",
                )
    console.print(table)
    for answer, window in zip(answers["target-only"], windows["target-only"], strict=True):
        fastest = fastest_forwards(answer["verdicts"], width=window.width)
        shown = " ".join(f"{ms:.2f}" for ms in fastest)
        console.print(f"target-only, fastest forward of each window, ms: {shown}", highlight=False)


def draw(windows: Mapping[str, Sequence[Windows]], goal: Path) -> None:
    """An SVG: time a token by place in the answer, a line an answer."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hippo"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.4))
    for colour, name in zip(("#2f6f9f", "#c2410c"), ("target-only", "adaptive"), strict=True):
        for number, one in enumerate(windows[name]):
            places = [one.width * (index + 0.5) for index in range(len(one.ms))]
            label = name if number == 0 else None
            axes.plot(places, one.ms, "-o", markersize=3, color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("place in the answer, tokens")
    axes.set_ylabel("ms a token")
    axes.legend(frameon=False)
    figure.tight_layout()
    goal.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(goal, metadata={"Date": None})
    pyplot.close(figure)
