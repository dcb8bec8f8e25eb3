"""Results as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_MOST_COLUMNS = 9


def show_rows(console: Console, title: str, result: Mapping[str, Any]) -> None:
    """Prints the rows, nested figures as columns; what does not fit is in the JSON."""
    rows = [_flat(row) for row in result["rows"]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left")
    for column in columns[:_MOST_COLUMNS]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns[:_MOST_COLUMNS]))
    if len(columns) > _MOST_COLUMNS:
        table.caption = f"and {len(columns) - _MOST_COLUMNS} columns more in the JSON"
    console.print(table)


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    cells: dict[str, str] = {}
    for name, value in row.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping) and {"mean", "low", "high"} <= set(value):
            half = (value["high"] - value["low"]) / 2
            cells[label] = f"{value['mean']:.4f} ±{half:.4f}"
        elif isinstance(value, Mapping):
            cells.update(_flat(value, f"{label} "))
        elif isinstance(value, float):
            cells[label] = f"{value:.3f}"
        else:
            cells[label] = str(value)
    return cells
