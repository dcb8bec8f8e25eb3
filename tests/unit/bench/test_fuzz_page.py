"""What the page says of fuzzing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.environment import describe_environment
from bench.fuzz import page
from bench.fuzz.findings import Findings


def _run(name: str, **environment: Any) -> dict[str, Any]:
    return {
        "command": f"python -m bench.fuzz {name}",
        "environment": {**describe_environment(), **environment},
        "name": name,
        "num_inputs": 1200,
        "outcomes": {f"outcome {number}": 10 - number for number in range(10)},
        "num_failures": 0,
        "seconds": 61.2,
        "figures": {"MiB at the end": 300.0, "processes left": 0},
    }


def test_each_row_has_its_commit_and_what_they_share_is_said_once() -> None:
    early, late = "2026-01-01T10:00:00+00:00", "2026-01-01T11:00:00+00:00"
    runs = [_run("media", commit="aaaa", time=late), _run("chat", commit="bbbb", time=early)]
    first, *lines = page.fuzz_section(runs).splitlines()
    assert first.startswith(f"Ended between {early} and {late}: ") and "aaaa" not in first
    held = "1,200 | 0 | 0 | 61 | 300 MiB at the end |"
    assert f"| `python -m bench.fuzz media` | `aaaa` | {held}" in lines
    assert f"| `python -m bench.fuzz chat` | `bbbb` | {held}" in lines
    assert "| all | | 2,400 | 0 | | | |" in lines
    columns = {line.count("|") for line in lines if line.startswith("|")}
    assert len(columns) == 1, "a row has more cells than another"
    assert sum("; 2 others" in line for line in lines) == 2


def test_runs_of_different_versions_are_no_one_table() -> None:
    with pytest.raises(SystemExit, match="different machines or versions"):
        page.fuzz_section([_run("media"), _run("chat", python="3.99.0")])


def test_the_page_is_written_from_what_the_runs_left_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reliability.md"
    path.write_text("# Page\n<!-- fuzz: begin -->\nold\n<!-- fuzz: end -->\nrest\n")
    monkeypatch.setattr(page, "PAGE", path)
    outs = []
    for name, count in (("media", 1500), ("chat", 20)):
        findings = Findings(name, 1)
        for _ in range(count):
            findings.count("decoded")
        findings.figures |= {"processes left": 0, "MiB at the end": 123.4}
        outs.append(tmp_path / f"fuzz-{name}.json")
        findings.write(outs[-1], ["python -m bench.fuzz", name])
    page.write_page(outs)
    text = path.read_text()
    assert "| `python -m bench.fuzz media` | " in text and "| all | | 1,520 | 0 |" in text
    assert "old" not in text and "rest" in text
    with pytest.raises(SystemExit, match=r"run python -m bench\.fuzz draft-stream first"):
        page.write_page([tmp_path / "fuzz-draft-stream.json"])
