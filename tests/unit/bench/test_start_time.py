"""Answers told by how many services ran compiled."""

from __future__ import annotations

import io

from rich.console import Console

from bench.start_time import table


def test_each_stretch_and_system_has_a_line() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    times = {(0, "target-only"): [10.0, 12.0, 30.0], (2, "target-only"): [8.0]}
    console.print(table(times, is_late=True))
    late, early = (
        line.split() for line in console.export_text().splitlines() if "target-only" in line
    )
    assert late[1:4] == ["2", "of", "them"] and late[-6:-1:2] == ["8.00", "8.00", "8.00"]
    assert early[1:4] == ["0", "of", "them"] and early[-6:-1:2] == ["12.00", "10.00", "30.00"]
