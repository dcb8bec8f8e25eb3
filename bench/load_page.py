"""The table, the page and the picture of the load benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.environment import ROOT
from bench.publish import environment_line, replace_measured

_COLUMNS = (
    "system",
    "clients",
    "tokens/s",
    "answers/s",
    "TTFT ms p50 / p99",
    "ms/token p50 / p99",
    "gap ms p99 / max",
    "acceptance",
    "tokens/forward",
    "rows/forward",
    "sequences/forward",
    "target busy (prefill)",
    "draft busy (prefill)",
    "CPU target, draft, gateway, clients",
    "equal",
)
_COLOURS = {
    "target-only": "#777777",
    "adaptive": "#2f6f9f",
    "both cores": "#c58a2c",
    "two replicas": "#8a5fa8",
}


def table(result: dict[str, Any]) -> Table:
    """The readable form of a result."""
    shown = Table(title=_title(result), title_justify="left")
    for column in _COLUMNS:
        shown.add_column(column, justify="left" if column == "system" else "right")
    for cells in _cells(result):
        shown.add_row(*cells)
    return shown


def publish(results: Sequence[dict[str, Any]]) -> None:
    """Rewrites docs/results-load.md between its markers, its JSON and docs/load.svg."""
    body = "\n\n".join(_section(result) for result in results)
    replace_measured(ROOT / "docs/results-load.md", body)
    text = json.dumps(list(results), indent=1) + "\n"
    (ROOT / "docs/results-load.json").write_text(text, encoding="utf-8")
    draw(results[0], ROOT / "docs/load.svg")


def draw(result: dict[str, Any], goal: Path) -> None:
    """Throughput, and the median time per token, over the number of clients."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hippo"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.6))
    for system in dict.fromkeys(line["system"] for line in result["loads"]):
        lines = [line for line in result["loads"] if line["system"] == system]
        clients = [line["num_clients"] for line in lines]
        style = {"label": system, "color": _COLOURS.get(system), "marker": "o", "markersize": 4}
        left.plot(clients, [line["tokens_per_s"] for line in lines], **style)
        right.plot(clients, [line["tpot_ms"]["p50"] for line in lines], **style)
    ticks = sorted({line["num_clients"] for line in result["loads"]})
    for axes, label in ((left, "tokens a second, all clients"), (right, "ms a token, median")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("clients")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=8)
    figure.suptitle(_title(result), fontsize=10, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(goal, metadata={"Date": None})


def _title(result: dict[str, Any]) -> str:
    return (
        f"{result['kind']} prompts, {result['dtype']}, T={result['temperature']:g}, "
        "closed loop on two cores"
    )


def _section(result: dict[str, Any]) -> str:
    lines = [f"## `{result['command'].strip()}`", "", environment_line(result["environment"]), ""]
    lines += [f"### {_title(result)}", "", f"| {' | '.join(_COLUMNS)} |"]
    lines.append("|---" * len(_COLUMNS) + "|")
    lines += [f"| {' | '.join(cells)} |" for cells in _cells(result)]
    return "\n".join(lines)


def _cells(result: dict[str, Any]) -> Iterator[list[str]]:
    for line in result["loads"]:
        services = line["services"]
        target, draft, cpu = services["target"], services["draft"], services["cpu"]
        gaps = line["gap_ms"]
        yield [
            line["system"],
            str(line["num_clients"]),
            _throughput(line),
            f"{line['answers_per_s']:.1f}",
            f"{line['ttft_ms']['p50']:.0f} / {line['ttft_ms']['p99']:.0f}",
            f"{line['tpot_ms']['p50']:.2f} / {line['tpot_ms']['p99']:.2f}",
            "-" if gaps is None else f"{gaps['p99']:.0f} / {gaps['max']:.0f}",
            _number(line["acceptance_rate"], ".3f"),
            f"{line['tokens_per_forward']:.2f}",
            _number(target["rows_per_forward"], ".1f"),
            _number(target["sequences_per_forward"], ".1f"),
            f"{target['busy']:.0%} ({target['prefill']:.0%})",
            f"{draft['busy']:.0%} ({draft['prefill']:.0%})",
            " ".join(f"{cpu[name]:.2f}" for name in ("target", "draft", "gateway", "clients")),
            f"{line['num_equal']}/{line['num_answers']}",
        ]


def _throughput(line: dict[str, Any]) -> str:
    low, high = line["tokens_per_s_range"]
    spread = f" [{low:.0f}, {high:.0f}]" if line["num_runs"] > 1 else ""
    return f"{line['tokens_per_s']:.0f}{spread}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
