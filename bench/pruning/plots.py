"""The plot of agreement over ratio in docs/pruning.md, as SVG."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hippo.lab.benchmark.plots import finish, new_figure

_COLOURS: Mapping[str, str] = {
    "holistic": "#c2410c",
    "attention": "#2f6f9f",
    "specvlm": "#7fb2d6",
    "uv": "#7a4f9f",
    "uniform": "#4d7c4f",
    "random": "#9aa39a",
}
_LEVELS: Mapping[str, str] = {"none": "#222222", "blind": "#bbbbbb"}


def draw_ratio(result: Mapping[str, Any], goal: Path) -> None:
    """Draws agreement over ratio: a line with intervals per strategy, and the levels of all visual
    tokens and of none."""
    figure = new_figure(7.6, 4.4)
    axes = figure.subplots()
    for strategy, colour in _COLOURS.items():
        own = [row for row in result["rows"] if row["strategy"] == strategy]
        ratios = [row["ratio"] for row in own]
        mean, low, high = (
            [100 * row["agreement"][key] for row in own] for key in ("mean", "low", "high")
        )
        axes.plot(ratios, mean, "-o", markersize=4, color=colour, label=strategy)
        axes.fill_between(ratios, low, high, color=colour, alpha=0.12, linewidth=0)
    for row in result["rows"]:
        if row["label"] in _LEVELS:
            colour = _LEVELS[row["label"]]
            level = 100 * row["agreement"]["mean"]
            axes.axhline(level, color=colour, linewidth=1, linestyle="--", label=row["label"])
    axes.set_xlabel("share of visual tokens the draft does not see")
    axes.set_ylabel("tokens on which the draft agrees, %")
    title = f"agreement with the target's greedy output; {result['num_clips']} clips"
    axes.set_title(f"{title}, {result.get('dtype', 'float32')}", fontsize=10, loc="left")
    axes.legend(fontsize=8, loc="best")
    finish(figure, goal)
