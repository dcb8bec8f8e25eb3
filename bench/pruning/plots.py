"""The pictures of docs/results-pruning.md, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS: Mapping[str, str] = {
    "holistic": "#c2410c",
    "hybrid": "#e9a13b",
    "attention": "#2f6f9f",
    "specvlm": "#7fb2d6",
    "uniform": "#4d7c4f",
    "random": "#9aa39a",
    "none": "#222222",
    "blind": "#bbbbbb",
}
_ABLATION_POINTS = 3.0  # what lies further below is written at the edge
_BLUE, _PALE = "#2f6f9f", "#9fc3dd"


def draw_all(results: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draws what there are results for; returns the files."""
    drawn = []
    for name, result in results.items():
        if (draw := DRAWERS.get(name)) is not None:
            goal = folder / f"pruning-{name}.svg"
            draw(result, goal)
            drawn.append(goal)
    return drawn


def draw_ratio(result: Mapping[str, Any], goal: Path) -> None:
    """Agreement against ratio, a line a strategy."""
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


def draw_costs(result: Mapping[str, Any], goal: Path) -> None:
    """Prefill time and cache against ratio."""
    rows = result["rows"]
    names = [f"{row['ratio']:g}" for row in rows]
    figure, axes = _axes(7.6, 3.2)
    places = list(range(len(rows)))
    times = [row["draft_prefill_ms"]["mean"] for row in rows]
    axes.bar([place - 0.2 for place in places], times, 0.38, color=_BLUE, label="draft prefill, ms")
    other = axes.twinx()
    sizes = [row["draft_cache_kib"]["mean"] for row in rows]
    other.bar([place + 0.2 for place in places], sizes, 0.38, color=_PALE, label="draft cache, KiB")
    for place, value, size in zip(places, times, sizes, strict=True):
        axes.text(place - 0.2, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
        other.text(place + 0.2, size, f"{size:.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(places, names)
    axes.set_xlabel("share of visual tokens the draft does not see")
    axes.set_ylabel("ms")
    other.set_ylabel("KiB")
    other.spines[["top"]].set_visible(False)
    handles = [bars[0] for bars in (*axes.containers, *other.containers)]
    axes.legend(handles, ["draft prefill, ms", "draft cache of the prompt, KiB"], fontsize=8)
    _finish(figure, axes, goal, _title(result, "what the draft costs"), legend="none")


def draw_bias(result: Mapping[str, Any], goal: Path) -> None:
    """Share kept over share present, both readings."""
    rows = list(reversed(result["rows"]))
    figure, axes = _axes(7.6, 0.42 * len(rows) + 1.4)
    for offset, key, label, colour in (
        (0.2, "ring", "outer ring of each frame", _BLUE),
        (-0.2, "ends", "first and last tenth of the sequence", _PALE),
    ):
        places = [index + offset for index in range(len(rows))]
        values = [row[key]["ratio"] for row in rows]
        axes.barh(places, values, 0.38, label=label, color=colour)
        for place, value in zip(places, values, strict=True):
            axes.text(value + 0.01, place, f"{value:.2f}", va="center", fontsize=8)
    axes.axvline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_xlabel("boundary tokens: share of those kept over share of all (1: no bias)")
    _finish(figure, axes, goal, _title(result, "position bias of the kept tenth"), legend="below")


def draw_ablation(result: Mapping[str, Any], goal: Path) -> None:
    """Every variant with its interval."""
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
    _finish(figure, axes, goal, title, legend="none")


def draw_kinds(result: Mapping[str, Any], goal: Path) -> None:
    """Agreement by group, a dot a strategy."""
    rows = list(reversed(result["rows"]))
    figure, axes = _axes(7.6, 0.34 * len(rows) + 1.4)
    for label in rows[0]["agreement"]:
        strategy = label.split(" ")[0]
        axes.plot(
            [100 * row["agreement"][label]["mean"] for row in rows],
            range(len(rows)),
            "o",
            markersize=5,
            color=COLOURS[strategy],
            label=label,
        )
    axes.set_yticks(range(len(rows)), [row["group"] for row in rows], fontsize=8)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_xlabel("tokens on which the draft agrees, %")
    title = _title(result, "by kind of question and place of the object")
    _finish(figure, axes, goal, title, legend="below")


def draw_strategies(result: Mapping[str, Any], goal: Path) -> None:
    """Decode speedup against ratio through the services."""
    rows = [
        {**row, "label": row["system"], "strategy": row["system"].split(" ")[0]}
        for row in result["rows"]
        if " " in row["system"]
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


def draw_policies(result: Mapping[str, Any], goal: Path) -> None:
    """Decode and end-to-end speedup of each policy."""
    rows = [row for row in result["rows"] if row["system"] != "target-only"]
    _speedup_bars(rows, [row["system"] for row in rows], goal, _title(result, "policies"))


def draw_overlap(result: Mapping[str, Any], goal: Path) -> None:
    """Speedups by layers tapped."""
    rows = [row for row in result["rows"] if row["system"] != "target-only"]
    title = _title(result, "adaptive, holistic, ratio 0.9")
    _speedup_bars(rows, [row["group"] for row in rows], goal, title)


def _speedup_bars(
    rows: Sequence[Mapping[str, Any]], labels: Sequence[str], goal: Path, title: str
) -> None:
    figure, axes = _axes(7.6, 0.42 * len(rows) + 1.6)
    for offset, key, label, colour in (
        (0.2, "decode_speedup", "decode (first token to last)", _BLUE),
        (-0.2, "end_to_end_speedup", "end to end (both prefills included)", _PALE),
    ):
        values = [row[key] for row in reversed(rows)]
        places = [index + offset for index in range(len(rows))]
        means = [value["mean"] for value in values]
        errors = [
            [value["mean"] - value["low"] for value in values],
            [value["high"] - value["mean"] for value in values],
        ]
        axes.barh(places, means, 0.38, xerr=errors, label=label, color=colour, capsize=2)
        for place, mean in zip(places, means, strict=True):
            axes.text(0.04, place, f"{mean:.2f}×", va="center", fontsize=8)
    axes.axvline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), list(reversed(labels)))
    axes.set_xlabel("times as fast as target-only decoding")
    _finish(figure, axes, goal, title, legend="below")


def draw_first_token(result: Mapping[str, Any], goal: Path) -> None:
    """Time to first token over target-only's."""
    rows = list(reversed(result["rows"]))
    figure, axes = _axes(7.6, 0.36 * len(rows) + 1.2)
    _dots(axes, [row["ttft_ratio"] for row in rows], [row["system"] for row in rows], scale=1)
    axes.axvline(1.03, color="#444444", linewidth=1, linestyle="--")
    axes.set_xlabel("time to first token over target-only's (dashed: the goal)")
    _finish(figure, axes, goal, _title(result, "time to first token"), legend="none")


def draw_confirm(result: Mapping[str, Any], goal: Path) -> None:
    """Agreement of every choice on the clips of another seed."""
    rows = list(reversed(result["rows"]))
    figure, axes = _axes(7.6, 0.3 * len(rows) + 1.2)
    _dots(axes, [row["agreement"] for row in rows], [row["label"] for row in rows])
    axes.set_xlabel("tokens on which the draft agrees, %")
    title = _title(result, "clips on which nothing was chosen")
    _finish(figure, axes, goal, title, legend="none")


def draw_frames(result: Mapping[str, Any], goal: Path) -> None:
    """Speedups against the number of frames."""
    figure, axes = _axes(7.6, 3.8)
    systems = dict.fromkeys(row["system"] for row in result["rows"])
    colours = ("#222222", "#c2410c", "#e9a13b", "#2f6f9f")
    chosen = [name for name in systems if name != "target-only"]
    for name, colour in zip(chosen, colours, strict=False):
        own = [row for row in result["rows"] if row["system"] == name]
        counts = [row["num_frames"] for row in own]
        for key, style, what in (
            ("decode_speedup", "-o", "decode"),
            ("end_to_end_speedup", "--o", "end to end"),
        ):
            axes.plot(
                counts,
                [row[key]["mean"] for row in own],
                style,
                markersize=4,
                color=colour,
                label=f"{name}, {what}",
            )
    axes.axhline(1.0, color="#444444", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    counts = sorted({row["num_frames"] for row in result["rows"]})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("frames (72 visual tokens each)")
    axes.set_ylabel("times as fast as target-only")
    _finish(figure, axes, goal, _title(result, "speedup by number of frames"))


DRAWERS: Mapping[str, Callable[[Mapping[str, Any], Path], None]] = {
    "ratio": draw_ratio,
    "costs": draw_costs,
    "bias": draw_bias,
    "ablation": draw_ablation,
    "kinds": draw_kinds,
    "strategies": draw_strategies,
    "policies": draw_policies,
    "overlap": draw_overlap,
    "frames": draw_frames,
    "first-token": draw_first_token,
    "confirm": draw_confirm,
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
    """A line with intervals for each strategy that has several ratios."""
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
    """A dashed line across, with its name above its left end."""
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


def _dots(
    axes: Any, values: Sequence[Mapping[str, float]], labels: Sequence[str], *, scale: float = 100
) -> None:
    for place, value in enumerate(values):
        ends = [scale * value["low"], scale * value["high"]]
        axes.plot(ends, [place, place], color=_PALE, linewidth=3)
        axes.plot([scale * value["mean"]], [place], "o", markersize=4, color=_BLUE)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.grid(axis="y", color="#eeeeee")


def _title(result: Mapping[str, Any], what: str) -> str:
    return f"{what}; {result['num_clips']} clips, float32"


def _finish(figure: Any, axes: Any, goal: Path, title: str, *, legend: str = "best") -> None:
    """Saves the picture; ``legend`` is "best", "below" or "none"."""
    from matplotlib import pyplot

    axes.set_title(title, fontsize=10, loc="left")
    if legend == "best":
        axes.legend(fontsize=8, loc="best")
    elif legend == "below":
        figure.legend(fontsize=8, loc="lower center", ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.07 if legend == "below" else 0, 1, 1))
    figure.savefig(goal, metadata={"Date": None})
    pyplot.close(figure)
