"""The table of an experiment's result, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.page import percent

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
