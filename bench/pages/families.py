"""Rewrites the tables of model families in README.md and docs/architecture.md:
``python -m bench.pages.families``."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.base.environment import ROOT
from bench.pages.markers import between_markers
from hippo.catalog.public_models import PUBLIC_CONFIGS
from hippo.client.tables import markdown
from hippo.models.load import FAMILIES

README, PAGE = ROOT / "README.md", ROOT / "docs/architecture.md"
_SIZE = re.compile(r"(?<=-)([\d.]+[bB])(?=-|$)")
_AXES = {1: "one axis", 3: "three axes"}


def with_table(path: Path) -> str:
    """Returns the file's text with a new table. Raises ValueError if its markers are missing."""
    head, *rows = _short() if path == README else _whole()
    table = markdown(head, rows, num_names=len(head))
    return between_markers(path.read_text(encoding="utf-8"), "families", table + "\n")


def _short() -> Iterator[Sequence[str]]:
    yield "family", "published checkpoints"
    for model_type, family in FAMILIES.items():
        yield family.title, _checkpoints(model_type)


def _whole() -> Iterator[Sequence[str]]:
    yield "`model_type`", "checkpoints", "a video's tokens", "positions"
    for model_type, family in FAMILIES.items():
        axes = _AXES[family.num_axes]
        yield f"`{model_type}`", _checkpoints(model_type), family.video_tokens, axes


def _checkpoints(model_type: str) -> str:
    """Writes names of a family as one: ``org/model-{2B,7B}``."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for name, config in PUBLIC_CONFIGS.items():
        if config["model_type"] == model_type:
            start, size, end = _SIZE.split(name, maxsplit=1)
            sizes.setdefault((start, end), []).append(size)
    return ", ".join(
        f"{start}{{{','.join(each)}}}{end}" if len(each) > 1 else f"{start}{each[0]}{end}"
        for (start, end), each in sizes.items()
    )


if __name__ == "__main__":
    for file in (README, PAGE):
        file.write_text(with_table(file), encoding="utf-8")
