"""Files that scripts of ``bench`` write from the code are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.pages import env_example, families, metrics_page, settings


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


def test_the_file_of_all_knobs_is_up_to_date_and_explains_each() -> None:
    text = env_example.GOAL.read_text(encoding="utf-8")
    assert text == env_example.text(), "run: python -m bench.pages.env_example"
    explained = re.findall(r"^# ([A-Z_]+)=", text, flags=re.MULTILINE)
    assert sorted(explained) == sorted(env_example.variables())
