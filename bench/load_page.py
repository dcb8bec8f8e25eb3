"""The table, the page and the picture of the load benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.environment import ROOT
from bench.publish import environment_line, replace_measured
from hippo.benchmark.plots import draw_load
from hippo.benchmark.tables import number

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


def table(result: dict[str, Any]) -> Table:
    """The readable form of a result."""
    shown = Table(title=_title(result), title_justify="left")
    for column in _COLUMNS:
        shown.add_column(column, justify="left" if column == "system" else "right")
    for cells in _cells(result):
        shown.add_row(*cells)
    return shown


def threads_table(result: dict[str, Any]) -> Table:
    """Processor time an answer took on each core, by what it went into; a load a row."""
    loads = [line for line in result["loads"] if line["services"].get("threads")]
    shown = Table(title="processor time an answer, ms", title_justify="left")
    for column in _COLUMNS[:2]:
        shown.add_column(column, justify="left" if column == "system" else "right")
    kinds = {
        (name, kind): None
        for line in loads
        for name, of_threads in line["services"]["threads"].items()
        for kind in of_threads
    }
    for name, kind in kinds:
        shown.add_column(f"{name}:\n{kind}", justify="right")
    for line in loads:
        threads = line["services"]["threads"]
        times = (threads.get(name, {}).get(kind, 0.0) for name, kind in kinds)
        cells = [f"{1e3 * time / line['answers_per_s']:.2f}" for time in times]
        shown.add_row(line["system"], str(line["num_clients"]), *cells)
    return shown


def publish(results: Sequence[dict[str, Any]]) -> None:
    """Rewrites docs/results-load.md between its markers, its JSON and docs/load.svg."""
    body = "\n\n".join(_section(result) for result in results)
    replace_measured(ROOT / "docs/results-load.md", body)
    text = json.dumps(list(results), indent=1) + "\n"
    (ROOT / "docs/results-load.json").write_text(text, encoding="utf-8")
    draw(results[0], ROOT / "docs/load.svg")


def draw(result: dict[str, Any], goal: Path) -> None:
    """Throughput, and median times per token and to the first one, over the number of clients."""
    draw_load(result["loads"], goal, title=_title(result))


def _title(result: dict[str, Any]) -> str:
    num_questions = result.get("questions_per_clip", 1)
    return (
        f"{result['kind']} prompts, {result['dtype']}, T={result['temperature']:g}, "
        + (f"{num_questions} questions a clip, " if num_questions > 1 else "")
        + "closed loop on two cores"
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
            number(line["acceptance_rate"], ".3f"),
            f"{line['tokens_per_forward']:.2f}",
            number(target["rows_per_forward"], ".1f"),
            number(target["sequences_per_forward"], ".1f"),
            f"{target['busy']:.0%} ({target['prefill']:.0%})",
            f"{draft['busy']:.0%} ({draft['prefill']:.0%})",
            " ".join(f"{cpu[name]:.2f}" for name in ("target", "draft", "gateway", "clients")),
            f"{line['num_equal']}/{line['num_answers']}",
        ]


def _throughput(line: dict[str, Any]) -> str:
    low, high = line["tokens_per_s_range"]
    spread = f" [{low:.0f}, {high:.0f}]" if line["num_runs"] > 1 else ""
    return f"{line['tokens_per_s']:.0f}{spread}"
