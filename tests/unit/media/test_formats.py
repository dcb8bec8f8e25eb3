"""docs/api.md lists what is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hippo.media.formats import CODECS, CONTAINERS, IMAGES

PAGE = " ".join((Path(__file__).parents[3] / "docs/api.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("containers", CONTAINERS),
        ("codecs", CODECS),
        ("images", [name.lower() for name in IMAGES]),
    ],
)
def test_the_page_lists_what_is_read(what: str, names: list[str]) -> None:
    assert f"- {what}: {', '.join(names)};" in PAGE
