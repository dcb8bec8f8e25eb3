"""The page of results is what its figures say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.base.cells import percent
from bench.base.environment import ROOT
from bench.pages import results as page

RESULTS: dict[str, Any] = json.loads((ROOT / "docs/results.json").read_text(encoding="utf-8"))


def test_the_page_is_made_of_the_figures_beside_it() -> None:
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert page.page(RESULTS) in text, "run: python -m bench.pages.results"
    pruning = (ROOT / "docs/pruning.md").read_text(encoding="utf-8")
    assert page.pruning_page(RESULTS) in pruning, "run: python -m bench.pages.results"
    for command in (RESULTS[name]["command"] for name in page.PRUNING if name in RESULTS):
        assert f"## `{command}`" in pruning and f"## `{command}`" not in text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page.readme_lines(RESULTS) in readme


def test_the_same_figures_give_the_same_pictures(tmp_path: Path) -> None:
    pictures = []
    for _ in range(2):
        page.draw(RESULTS, tmp_path)
        pictures.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert pictures[0] == pictures[1]
    assert {"speedup.svg", "load.svg", "pruning-ratio.svg"} <= set(pictures[0])


def test_a_new_measurement_takes_the_place_of_the_old_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README.md", "docs/results.md", "docs/pruning.md"):
        goal = tmp_path / name
        goal.parent.mkdir(exist_ok=True)
        goal.write_text("<!-- measured: begin -->\n<!-- measured: end -->\n", encoding="utf-8")
    kept = {name: RESULTS[name] for name in ("short", "confirm")}
    (tmp_path / "docs/results.json").write_text(json.dumps(kept), encoding="utf-8")
    new = {**RESULTS["confirm"], "command": "python -m bench.pruning confirm again"}
    (tmp_path / "confirm.json").write_text(json.dumps(new), encoding="utf-8")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "_DOCS", tmp_path / "docs")
    page.main([str(tmp_path / "confirm.json")])
    docs = tmp_path / "docs"
    results, pruning = ((docs / f"{name}.md").read_text("utf-8") for name in ("results", "pruning"))
    assert RESULTS["short"]["command"] in results and "confirm again" not in results
    assert "confirm again" in pruning


@pytest.mark.parametrize(
    ("value", "is_signed", "text"),
    [
        ({"mean": 0.98, "low": 0.97, "high": 0.99}, False, "98.00 ±1.00"),
        ({"mean": -0.01, "low": -0.02, "high": 0.0}, True, "-1.00 ±1.00"),
    ],
)
def test_shares_are_shown_in_percent(value: dict[str, float], is_signed: bool, text: str) -> None:
    assert percent(value, is_signed=is_signed) == text


def test_presets_stand_in_no_table_of_another_pruning() -> None:
    heading, found = "", []
    for line in page.page(RESULTS).splitlines():
        heading = line if line.startswith("#") else heading
        if "| preset " in line and "pruning:" in heading:
            found.append(heading)
    assert found and all(each.endswith("pruning: each preset's own") for each in found)
