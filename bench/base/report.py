"""Tables of a measurement in a folder, as Markdown and JSON, written again after each row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.base.environment import describe_environment


class Report:
    """The files NAME.json and NAME.md of a folder.

    Sections of an earlier report in the folder stay, unless a section of the same name is begun.
    """

    def __init__(self, folder: Path, name: str, *, console: Console, **facts: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.json"
        self._console = console
        self._facts = {"environment": describe_environment(), **facts}
        self._sections: dict[str, Any] = {}
        if self._path.exists():
            self._sections = json.loads(self._path.read_text(encoding="utf-8"))["sections"]

    def begin_section(self, name: str) -> Section:
        """Returns a new section, which replaces one of the same name."""
        content: dict[str, Any] = {**self._facts, "notes": [], "tables": []}
        self._sections[name] = content
        return Section(self, content, self._console)

    def write_files(self) -> None:
        """Writes both files; each is replaced in one step."""
        document = json.dumps({"sections": self._sections}, indent=1) + "\n"
        _replace(self._path, document)
        _replace(self._path.with_suffix(".md"), "\n".join(self._markdown()) + "\n")

    def _markdown(self) -> list[str]:
        lines = []
        for name, content in self._sections.items():
            lines += [f"## {name}", ""]
            facts = {key: content[key] for key in content if key not in ("notes", "tables")}
            lines += [f"{key}: {value}  " for key, value in facts.items()]
            lines += ["", *(f"- {note}" for note in content["notes"])]
            for table in content["tables"]:
                columns = table["columns"]
                lines += ["", table["title"], "", _line(columns), _line(["---"] * len(columns))]
                lines += map(_line, table["rows"])
            lines.append("")
        return lines


class Section:
    """One section of a report."""

    def __init__(self, report: Report, content: dict[str, Any], console: Console) -> None:
        self._report = report
        self._content = content
        self._console = console

    def add_note(self, note: str) -> None:
        """Prints and writes a sentence."""
        self._content["notes"].append(note)
        self._console.print(note, highlight=False, markup=False, soft_wrap=True)
        self._report.write_files()

    def add_table(self, title: str, columns: Sequence[str]) -> GrowingTable:
        """Returns a table without rows."""
        content: dict[str, Any] = {
            "title": title,
            "columns": list(columns),
            "rows": [],
            "figures": [],
        }
        self._content["tables"].append(content)
        return GrowingTable(self._report, content, self._console)


class GrowingTable:
    """A table whose rows are printed and written one by one."""

    def __init__(self, report: Report, content: dict[str, Any], console: Console) -> None:
        self._report = report
        self._content = content
        self._console = console
        console.print(f"{content['title']}: {_line(content['columns'])}", markup=False)

    def add_row(self, cells: Sequence[str], figures: Mapping[str, Any]) -> None:
        """Adds a row with its figures for JSON."""
        self._content["rows"].append(list(cells))
        self._content["figures"].append(dict(figures))
        self._console.print(_line(cells), highlight=False, markup=False, soft_wrap=True)
        self._report.write_files()


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
