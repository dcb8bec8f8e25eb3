"""Tables of a measurement in a folder, as Markdown and JSON, written again after each row."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.base.environment import describe_environment
from hippo.client.tables import markdown, number

Columns = Mapping[str, tuple[str, str]]
"""By heading: the key of a row's figure, and its format; None is a dash."""


class Report:
    """The files NAME.json and NAME.md of a folder: sections with notes and tables.

    Sections of an earlier report in the folder stay, unless a section of the same name is begun.
    Notes and tables go into the section, and rows into the table, that were begun last.
    """

    def __init__(self, folder: Path, name: str, *, console: Console, **facts: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.json"
        self._console = console
        self._facts = {"environment": describe_environment(), **facts}
        self._sections: dict[str, Any] = {}
        if self._path.exists():
            self._sections = json.loads(self._path.read_text(encoding="utf-8"))["sections"]

    def begin_section(self, name: str) -> None:
        """Begins a section, which replaces a section of the same name."""
        self._section: dict[str, Any] = {**self._facts, "notes": [], "tables": []}
        self._sections[name] = self._section

    def add_note(self, note: str) -> None:
        """Prints and writes a sentence."""
        self._section["notes"].append(note)
        self._add(note)

    def begin_table(self, title: str, columns: Columns) -> None:
        """Begins a table without rows."""
        self._columns = columns
        table = {"title": title, "columns": list(columns), "rows": [], "figures": []}
        self._section["tables"].append(table)
        self._add(f"{title}: {' | '.join(columns)}")

    def add_row(self, figures: Mapping[str, Any]) -> None:
        """Adds a row to the table; all its figures go into the JSON."""
        table = self._section["tables"][-1]
        cells = [number(figures[key], form) for key, form in self._columns.values()]
        table["rows"].append(cells)
        table["figures"].append(dict(figures))
        self._add(" | ".join(cells))

    def _add(self, line: str) -> None:
        """Prints a line and writes both files, each in one step."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        document = json.dumps({"sections": self._sections}, indent=1) + "\n"
        for path, text in (
            (self._path, document),
            (self._path.with_suffix(".md"), "\n".join(self._markdown()) + "\n"),
        ):
            partial = path.with_name(path.name + ".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)

    def _markdown(self) -> list[str]:
        lines = []
        for name, section in self._sections.items():
            facts = {key: section[key] for key in section if key not in ("notes", "tables")}
            lines += [f"## {name}", "", *(f"{key}: {value}  " for key, value in facts.items()), ""]
            lines += [f"- {note}" for note in section["notes"]]
            for table in section["tables"]:
                lines += ["", table["title"], "", markdown(table["columns"], table["rows"])]
            lines.append("")
        return lines
