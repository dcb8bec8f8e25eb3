"""What scripts of ``bench`` write from the code and from figures is up to date."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bench.base.environment import ROOT
from bench.pages import env_example, families, metrics_page, settings
from bench.pages import results as page
from bench.predicted import __main__ as predicted
from bench.predicted.published import published_rows, target_step_ms
from bench.predicted.scaling import PAIR_NAMES, scaling_rows, tokens_per_second
from hippo.client.tables import markdown
from hippo.lab.simulation.pairs import PAIRS
from hippo.media.formats import CODECS, CONTAINERS, IMAGES


def test_the_page_on_metrics_is_the_codes() -> None:
    text = metrics_page.PAGE.read_text(encoding="utf-8")
    assert text == metrics_page.with_tables(text), "run: python -m bench.pages.metrics_page"


def test_the_page_on_settings_is_the_declarations() -> None:
    text = settings.PAGE.read_text(encoding="utf-8")
    assert text == settings.text(), "run: python -m bench.pages.settings"


@pytest.mark.parametrize("page", [families.README, families.PAGE], ids=lambda page: page.name)
def test_the_tables_of_families_are_the_codes(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == families.with_table(page), (
        "run: python -m bench.pages.families"
    )


@pytest.mark.parametrize(
    ("what", "names"),
    [("containers", CONTAINERS), ("codecs", CODECS), ("images", [name.lower() for name in IMAGES])],
)
def test_the_page_on_the_api_lists_what_is_read(what: str, names: list[str]) -> None:
    text = " ".join((ROOT / "docs/api.md").read_text(encoding="utf-8").split())
    assert f"- {what}: {', '.join(names)};" in text


def test_the_file_of_all_knobs_is_up_to_date_and_explains_each() -> None:
    text = env_example.GOAL.read_text(encoding="utf-8")
    assert text == env_example.text(), "run: python -m bench.pages.env_example"
    explained = re.findall(r"^# ([A-Z_]+)=", text, flags=re.MULTILINE)
    assert sorted(explained) == sorted(env_example.variables())


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


def test_presets_stand_in_no_table_of_another_pruning() -> None:
    heading, found = "", []
    for line in page.page(RESULTS).splitlines():
        heading = line if line.startswith("#") else heading
        if "| preset " in line and "pruning:" in heading:
            found.append(heading)
    assert found and all(each.endswith("pruning: each preset's own") for each in found)


PREDICTED = predicted.PAGE.read_text(encoding="utf-8")


def _line(cells: tuple[str, ...]) -> str:
    return markdown((), [cells]).splitlines()[-1]


def test_the_page_has_the_published_rows_that_the_simulator_predicts() -> None:
    for cells in islice(published_rows(), 1):
        assert _line(cells) in PREDICTED, "run: python -m bench.predicted published"
    assert f"computed as {target_step_ms():.1f} ms for nano-PEARL" in PREDICTED


def test_the_page_has_the_gpus_that_the_simulator_and_the_sizes_say() -> None:
    rows = list(scaling_rows(("a100-40", "h100"), ("qwen-3b-72b-nf4",)))
    assert [cells[2] for cells in rows] == ["does not fit", "1 for both", "1 + 1"]
    for cells in rows:
        assert _line(cells) in PREDICTED, "run: python -m bench.predicted scaling"
    assert f"{tokens_per_second()} visual tokens" in PREDICTED


def test_every_part_has_its_head_and_its_pairs_on_the_page() -> None:
    for head, _, _ in predicted.TABLES.values():
        assert _line(tuple(head)) in PREDICTED
    assert all(PAIRS[name].title in PREDICTED for name in PAIR_NAMES)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predicted.main(["speed"])
    assert "speed is none of pairs, published, helper, scaling" in capsys.readouterr().err
