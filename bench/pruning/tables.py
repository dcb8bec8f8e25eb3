"""The tables of pruning experiments: for the terminal, and as Markdown for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.cells import percent
from bench.systems import TARGET_ONLY
from hippo.benchmark.tables import interval, markdown, number

Result = Mapping[str, Any]

_LEFT_OUT = ("strategy", "ratio", "num_clips", "num_samples")  # the label or the title tells


def table_of(result: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Returns the title, the heads and the rows; shares and their differences are in percent."""
    rows = result["rows"]
    title = "{experiment}: {target} and {draft}, {dtype}, {num_clips} clips of {source}"
    facts = [title.format(**result)]
    facts += [f"grid {grid}: {number} clips" for grid, number in result.get("grids", {}).items()]
    heads = []
    for key, value in rows[0].items():
        if key in _LEFT_OUT:
            continue
        if isinstance(value, int | float) and all(row[key] == value for row in rows):
            facts.append(f"{_cell(key, value)} {key.replace('_', ' ')}")
        else:
            heads.append(key)
    cells = [[_cell(key, row[key]) for key in heads] for row in rows]
    return "; ".join([*facts, "shares in %"]), [key.replace("_", " ") for key in heads], cells


def _cell(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return percent(value, is_signed=key.startswith("minus "))
    return value if isinstance(value, str) else f"{value:g}"


def markdown_tables(name: str, result: Result) -> list[str]:
    """Returns the tables of experiment ``name``, each after a line that says what it shows."""
    if name == "services":
        return _services(result)
    if name == "ablation":
        return [_ablation(result)]
    if name in ("bias", "frames"):
        title, head, rows = table_of(result)
        return [f"{title}:", markdown(head, rows)]
    title = "Agreement in percent, and in brackets its difference from seeing every token:"
    cells = {
        row["label"]: f"{percent(row['agreement'])} ({percent(row['minus none'], is_signed=True)})"
        for row in result["rows"]
    }
    return [title, _by_ratio(cells)]


def _ablation(result: Result) -> str:
    """Returns a row per variant, without the variants that equal the first row."""
    keys = (key for key in result["rows"][0] if key.startswith("minus "))
    reference = next(key for key in keys if key != "minus none")
    shown = [
        row
        for row in result["rows"]
        if row["label"] == reference.removeprefix("minus ") or any(row[reference].values())
    ]
    rows = [
        [
            row["label"],
            percent(row["agreement"]),
            percent(row["content_agreement"]),
            percent(row[reference], is_signed=True),
        ]
        for row in shown
    ]
    head = ("choice of visual tokens", "agreement, %", "content words, %", "minus the first row")
    return markdown(head, rows)


def _services(result: Result) -> list[str]:
    rows = [row for row in result["rows"] if row["system"] != TARGET_ONLY]
    num_equal = sum(row["num_equal"] for row in rows)
    title = (
        "Speedup of decoding with its 95 % interval, in brackets end to end, then the acceptance "
        f"rate; {num_equal} of {sum(row['num_answers'] for row in rows)} answers equal:"
    )
    cells = {
        row["system"]: f"{interval(row['decode_speedup'])} "
        f"({row['end_to_end_speedup']['mean']:.2f}), {number(row['acceptance_rate'], '.2f')}"
        for row in rows
    }
    return [title, _by_ratio(cells)]


def _by_ratio(cells: Mapping[str, str]) -> str:
    """Returns a table with a row per strategy and a column per ratio, from cells by
    ``"STRATEGY RATIO"``; a system without a ratio has its cell in the first column."""
    table: dict[str, dict[str, str]] = {}
    for name, cell in cells.items():
        strategy, _, last = name.rpartition(" ")
        has_ratio = last.replace(".", "").isdecimal()
        table.setdefault(strategy if has_ratio else name, {})[last if has_ratio else ""] = cell
    ratios = sorted({ratio for row in table.values() for ratio in row})
    rows = [[name, *(row.get(ratio, "") for ratio in ratios)] for name, row in table.items()]
    return markdown(["strategy, ratio", *(ratio or "as it is" for ratio in ratios)], rows)
