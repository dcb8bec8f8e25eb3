"""Writes docs/settings.md from the settings' declarations: ``python -m bench.pages.settings``."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from bench.base.environment import ROOT
from gateway.common.config import GatewaySettings
from hippo.base.config import as_text
from hippo.service.settings import EngineSettings
from services.draft.config import DraftSettings
from services.target.config import TargetSettings

PAGE = ROOT / "docs/settings.md"
_HEAD = """\
# Settings

`python -m bench.pages.settings` writes this page. The option `--x-y` is also an environment
variable, which the option overrides: `HIPPO_GATEWAY_X_Y`, `HIPPO_DRAFT_X_Y` or `HIPPO_TARGET_X_Y`.
A switch is turned off by `--no-x-y`. Lists are separated by commas. `hippo up --help` has the
options of `hippo up`, and [.env.example](../.env.example) the variables of Docker Compose.
"""
_SECTIONS: tuple[tuple[str, Any, Any], ...] = (
    ("Gateway: `python -m gateway`", GatewaySettings, None),
    ("Draft and target", EngineSettings, None),
    ("Draft alone: `python -m services.draft`", DraftSettings, EngineSettings),
    ("Target alone: `python -m services.target`", TargetSettings, EngineSettings),
)


def text() -> str:
    """Returns the content of the page."""
    return _HEAD + "".join(
        f"\n## {title}\n\n|option|default|meaning|\n|---|---|---|\n"
        + "".join(f"|{'|'.join(row)}|\n" for row in _rows(settings, known))
        for title, settings, known in _SECTIONS
    )


def _rows(settings: Any, known: Any) -> Iterator[tuple[str, str, str]]:
    """Yields option, default and meaning of each setting that ``known`` does not declare."""
    others = {field.name for field in dataclasses.fields(known)} if known else set()
    for field in dataclasses.fields(settings):
        if field.name not in others:
            option = "--" + field.name.replace("_", "-")
            choices = ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
            meaning = field.metadata["help"] + (f" ({choices})" if choices else "")
            yield f"`{option}`", _default(field.default), meaning.replace("*", "\\*")


def _default(value: object) -> str:
    if value is dataclasses.MISSING:
        return "required"
    shown = as_text(value)
    return f"`{shown}`" if shown else ""


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
