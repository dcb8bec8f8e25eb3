"""The tables of predictions are what the simulator says."""

from __future__ import annotations

from itertools import islice

import pytest

from bench.predicted import __main__ as predicted
from bench.predicted.published import published_rows, target_step_ms
from bench.predicted.scaling import PAIR_NAMES, scaling_rows, tokens_per_second
from hippo.client.tables import markdown
from hippo.lab.simulation.pairs import PAIRS

PAGE = predicted.PAGE.read_text(encoding="utf-8")


def _line(cells: tuple[str, ...]) -> str:
    return markdown((), [cells]).splitlines()[-1]


def test_the_page_has_the_published_rows_that_the_simulator_predicts() -> None:
    for cells in islice(published_rows(), 1):
        assert _line(cells) in PAGE, "run: python -m bench.predicted published"
    assert f"computed as {target_step_ms():.1f} ms for nano-PEARL" in PAGE


def test_the_page_has_the_gpus_that_the_simulator_and_the_sizes_say() -> None:
    rows = list(scaling_rows(("a100-40", "h100"), ("qwen-3b-72b-nf4",)))
    assert [cells[2] for cells in rows] == ["does not fit", "1 for both", "1 + 1"]
    for cells in rows:
        assert _line(cells) in PAGE, "run: python -m bench.predicted scaling"
    assert f"{tokens_per_second()} visual tokens" in PAGE


def test_every_part_has_its_head_and_its_pairs_on_the_page() -> None:
    for head, _, _ in predicted.TABLES.values():
        assert _line(tuple(head)) in PAGE
    assert all(PAIRS[name].title in PAGE for name in PAIR_NAMES)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predicted.main(["speed"])
    assert "speed is none of pairs, published, scaling" in capsys.readouterr().err
