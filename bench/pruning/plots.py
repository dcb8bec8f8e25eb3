"""The plots of pruning experiments in docs/pruning.md, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS: Mapping[str, str] = {
    "holistic": "#c2410c",
    "attention": "#2f6f9f",
    "specvlm": "#7fb2d6",
    "uv": "#7a4f9f",
    "uniform": "#4d7c4f",
    "random": "#9aa39a",
    "none": "#222222",
    "blind": "#bbbbbb",
}
_ABLATION_POINTS = 3.0  # lower values are written at the edge
_BLUE, _PALE = "#2f6f9f", "#9fc3dd"


def draw_ratio(result: Mapping[str, Any], goal: Path) -> None:
    """Draws agreement over ratio, a line per strategy."""
    figure, axes = _axes(7.6, 4.4)
    _lines(axes, result["rows"], lambda row: row["agreement"], 100)
    for label in ("none", "blind"):
        row = next((row for row in result["rows"] if row["label"] == label), None)
        if row is not None:
            value = 100 * row["agreement"]["mean"]
            _level(axes, value, label)
    axes.set_xlabel("share of visual tokens the draft does not see")
    axes.set_ylabel("tokens on which the draft agrees, %")
    _finish(figure, axes, goal, _title(result, "agreement with the target's greedy output"))


def draw_ablation(result: Mapping[str, Any], goal: Path) -> None:
    """Draws every variant of the ablation with its interval."""
    rows = list(reversed(result["rows"]))
    figure, axes = _axes(7.6, 0.24 * len(rows) + 1.2)
    _dots(axes, [row["agreement"] for row in rows], [row["label"] for row in rows])
    none = next(row for row in rows if row["label"] == "none")
    best = 100 * none["agreement"]["mean"]
    axes.axvline(best, color="#444444", linewidth=1, linestyle="--")
    axes.set_xlim(best - _ABLATION_POINTS, best + 0.5)
    for place, row in enumerate(rows):
        mean = 100 * row["agreement"]["mean"]
        if mean < best - _ABLATION_POINTS:  # off the scale
            axes.text(best - _ABLATION_POINTS, place, f" ◂ {mean:.1f}", va="center", fontsize=8)
    axes.set_xlabel("tokens on which the draft agrees, % (dashed: nothing pruned)")
    title = _title(result, f"one thing changed at a time, ratio {result['ratio']:g}")
    _finish(figure, axes, goal, title, has_legend=False)


def draw_confirm(result: Mapping[str, Any], goal: Path) -> None:
    """Draws the agreement of every choice on the clips of another seed."""
    rows = list(reversed(result["rows"]))
    figure, axes = _axes(7.6, 0.3 * len(rows) + 1.2)
    _dots(axes, [row["agreement"] for row in rows], [row["label"] for row in rows])
    axes.set_xlabel("tokens on which the draft agrees, %")
    title = _title(result, "clips on which nothing was chosen")
    _finish(figure, axes, goal, title, has_legend=False)


def draw_services(result: Mapping[str, Any], goal: Path) -> None:
    """Draws the decode speedup over ratio, measured through the services."""
    rows = [
        {**row, "label": row["system"], "strategy": row["system"].split(" ")[0]}
        for row in result["rows"]
        if row["system"].split(" ")[0] in COLOURS and row["system"].count(" ") == 1
    ]
    for row in rows:
        row["ratio"] = float(row["system"].split(" ")[1])
    figure, axes = _axes(7.6, 4.0)
    _lines(axes, rows, lambda row: row["decode_speedup"], 1)
    for row in result["rows"]:
        if row["system"] in ("none", "blind"):
            _level(axes, row["decode_speedup"]["mean"], row["system"])
    axes.set_xlabel("share of visual tokens the draft does not see")
    axes.set_ylabel("times as fast as target-only, decode")
    _finish(figure, axes, goal, _title(result, "adaptive policy, through the services"))


def draw_bias(result: Mapping[str, Any], goal: Path) -> None:
    """Draws, for each score, the share kept over the share present at both boundaries."""
    rows = list(reversed(result["rows"]))
    figure, axes = _axes(7.6, 0.5 * len(rows) + 1.4)
    for name, colour, shift in (("ring", _BLUE, 0.12), ("ends", COLOURS["holistic"], -0.12)):
        values = [row[f"{name}, over all"] for row in rows]
        for place, value in enumerate(values):
            ends = [value["low"], value["high"]]
            axes.plot(ends, [place + shift] * 2, color=colour, linewidth=3, alpha=0.4)
        places = [place + shift for place in range(len(rows))]
        label = "outer ring of the frame" if name == "ring" else "first and last tenth"
        axes.plot([v["mean"] for v in values], places, "o", markersize=5, color=colour, label=label)
    axes.axvline(1, color="#444444", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=8)
    axes.set_xlabel("share of the kept tokens there over the share of all tokens (dashed: no bias)")
    _finish(figure, axes, goal, _title(result, "where the highest tenth of the scores lies"))


def draw_frames(result: Mapping[str, Any], goal: Path) -> None:
    """Draws agreement over the number of frames, pruned and unpruned."""
    figure, axes = _axes(7.6, 4.0)
    for strategy in ("none", "holistic"):
        rows = [row for row in result["rows"] if row["strategy"] == strategy]
        counts = [row["num_frames"] for row in rows]
        for key, scale in (("mean", 100), ("low", 100), ("high", 100)):
            values = [scale * row["agreement"][key] for row in rows]
            style = "-o" if key == "mean" else ":"
            label = rows[0]["label"].partition(", ")[2] if key == "mean" else None
            axes.plot(counts, values, style, color=COLOURS[strategy], markersize=4, label=label)
    axes.set_xlabel("frames")
    axes.set_ylabel("tokens on which the draft agrees, %")
    _finish(figure, axes, goal, _title(result, "agreement by number of frames"))


DRAWERS: Mapping[str, Callable[[Mapping[str, Any], Path], None]] = {
    "ratio": draw_ratio,
    "ablation": draw_ablation,
    "bias": draw_bias,
    "frames": draw_frames,
    "confirm": draw_confirm,
    "services": draw_services,
}


def _axes(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hippo"
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height))


def _lines(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    value_of: Callable[[Mapping[str, Any]], Mapping[str, float]],
    scale: float,
) -> None:
    """Draws a line with intervals for each strategy with several ratios."""
    for strategy, colour in COLOURS.items():
        own = [row for row in rows if row["strategy"] == strategy]
        if len(own) < 2:
            continue
        values = [value_of(row) for row in own]
        ratios = [row["ratio"] for row in own]
        means = [scale * value["mean"] for value in values]
        axes.plot(ratios, means, "-o", markersize=4, color=colour, label=strategy)
        axes.fill_between(
            ratios,
            [scale * value["low"] for value in values],
            [scale * value["high"] for value in values],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )


def _level(axes: Any, value: float, label: str) -> None:
    """Draws a dashed horizontal line with its name above its left end."""
    axes.axhline(value, color=COLOURS[label], linewidth=1, linestyle="--")
    axes.annotate(
        label,
        (0.01, value),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 2),
        textcoords="offset points",
        fontsize=8,
        color="#444444",
    )


def _dots(axes: Any, values: Sequence[Mapping[str, float]], labels: Sequence[str]) -> None:
    for place, value in enumerate(values):
        ends = [100 * value["low"], 100 * value["high"]]
        axes.plot(ends, [place, place], color=_PALE, linewidth=3)
        axes.plot([100 * value["mean"]], [place], "o", markersize=4, color=_BLUE)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.grid(axis="y", color="#eeeeee")


def _title(result: Mapping[str, Any], what: str) -> str:
    return f"{what}; {result['num_clips']} clips, {result.get('dtype', 'float32')}"


def _finish(figure: Any, axes: Any, goal: Path, title: str, *, has_legend: bool = True) -> None:
    """Saves the plot."""
    from matplotlib import pyplot

    axes.set_title(title, fontsize=10, loc="left")
    if has_legend:
        axes.legend(fontsize=8, loc="best")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 1))
    figure.savefig(goal, metadata={"Date": None})
    pyplot.close(figure)
