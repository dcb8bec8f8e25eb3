"""Tables and pictures."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from hippo.client.figures import summarise
from hippo.client.latency import TARGET_ONLY
from hippo.client.tables import latency_table, load_table, questions_table
from hippo.lab.benchmark.load import LoadRun
from hippo.lab.benchmark.load_figures import summarise_load
from hippo.lab.benchmark.plots import check_plot, draw_answers, draw_load, draw_speedups
from hippo.lab.benchmark.question_figures import page_of, table_of
from tests.unit.client.test_figures import ended, record


def shown(table: Table, width: int = 200) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(table)
    return out.getvalue()


def load_line(**fields: Any) -> dict[str, Any]:
    run = LoadRun(num_warm=1)
    run.ended += [ended(0, 1), ended(0, 2, 3), ended(0, 3, 4)]
    return {**summarise_load(run, {0: tuple(range(5))}), **fields}


ROWS = summarise([record(TARGET_ONLY, 2.0), record("adaptive", 0.5), record("adaptive", 1.0)])


def test_speedups_stand_with_their_intervals_and_fit_into_80_columns() -> None:
    text = shown(latency_table("short", ROWS), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert re.search(r"adaptive .*3\.00", text) and "[2.00, 4.00]" in text


def test_rows_of_questions_fit_into_80_columns_by_category() -> None:
    row = {"num_right": 1234, "num_scored": 2700, "category": "short", "system": TARGET_ONLY}
    rows = [{**ROWS[1], **row, "num_answers": 2700, "num_equal": 2700}]
    rows += [{**rows[0], "system": "vpsd γ=15"}, {**rows[0], "category": "long", "num_scored": 0}]
    table = table_of(rows)
    text = shown(questions_table("many", table), width=80)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert text.count("short") == 1 and "45.7%" in text
    page = page_of("many", table).splitlines()
    assert page[3] == "| --- | --- |" + " ---: |" * (len(table[0]) - 2)
    assert "1234/2700 45.7%" in page[4] and "3.00 [2.00, 4.00]" in page[4]
    assert page[6].startswith("| long |") and page[6].endswith("| - |")


def test_a_load_has_a_line_and_shows_only_what_is_known() -> None:
    lines = [load_line(system="adaptive", num_clients=4), load_line(system="off", num_clients=4)]
    text = shown(load_table("load", lines), width=80)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "accept" in text and "2/2" in text
    plain = load_line(system="plain", num_clients=4, acceptance_rate=None, num_equal=None)
    text = shown(load_table("load", [plain]))
    assert "accept" not in text and "equal" not in text


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_figures_are_drawn(tmp_path: Path, suffix: str) -> None:
    check_plot(tmp_path / f"a{suffix}")
    draw_speedups(ROWS, tmp_path / f"a{suffix}", title="speedups")
    lines = [
        load_line(system=system, num_clients=count)
        for system in ("off", "adaptive")
        for count in (1, 8)
    ]
    draw_load(lines, tmp_path / f"b{suffix}", title="load")
    draw_answers("plain", {"ms": [3.0, 1.0]}, tmp_path / f"c{suffix}", title="answers")
    for name in "abc":
        data = (tmp_path / f"{name}{suffix}").read_bytes()
        assert b"<svg" in data[:1000] if suffix == ".svg" else data.startswith(b"\x89PNG")
