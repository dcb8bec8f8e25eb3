"""Tables of measurements on the terminal."""

import os
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_WIDTH_OF_FILES = 200  # columns


def wide_console() -> Console:
    """Returns a console as wide as the terminal or ``COLUMNS``, else wide enough for any table."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_OF_FILES
    return console


def wide_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table with names in its first column and numbers in the others."""
    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, justify="right" if shown.columns else "left")
    for cells in rows:
        shown.add_row(*cells)
    return shown
