"""The page on the architecture names what there is."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[3] / "docs/architecture.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("### The way of one token")[2].partition("\n## ")[0]
WAY = re.findall(r"^\| `([\w.]+)` \|", SECTION, re.MULTILINE)


@pytest.mark.parametrize("name", WAY)
def test_each_function_on_a_tokens_way_exists(name: str) -> None:
    parts = name.split(".")
    num_module = next(i for i, part in enumerate(parts) if part[0].isupper() or i == len(parts) - 1)
    module = importlib.import_module(".".join(parts[:num_module]))
    assert callable(reduce(getattr, parts[num_module:], module))


def test_a_tokens_way_is_at_most_thirty_calls() -> None:
    assert 20 < len(WAY) <= 30
