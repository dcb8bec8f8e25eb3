"""docs/api.md names every field of a request and of an answer's figures, and every kind of event;
the page at / reads fields that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from gateway.answer import event_schemas, figures
from gateway.answer.figures import UsageResponse
from gateway.api import media_schemas, schemas, structured

ROOT = Path(__file__).parents[4]
PAGE = re.sub(r"```.*?```", "", (ROOT / "docs/api.md").read_text("utf-8"), flags=re.DOTALL)


def _models(*modules: object) -> list[type[BaseModel]]:
    found = (each for module in modules for each in vars(module).values())
    return [each for each in found if isinstance(each, type) and issubclass(each, BaseModel)]


EVENTS = _models(event_schemas)
NAMED = [
    model
    for model in _models(media_schemas, structured, schemas, figures)
    if model.model_fields and model is not UsageResponse  # whose names are OpenAI's
]


@pytest.mark.parametrize("model", NAMED, ids=lambda model: str(model.__name__))
def test_every_field_is_in_the_document(model: type[BaseModel]) -> None:
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE))))
    assert set(model.model_fields) - told == set()


def test_every_kind_of_event_has_its_row() -> None:
    table = PAGE.split("## Events of a stream")[1].split("\n## ")[0]
    title, *rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    kinds = [model.model_fields["type"] for model in EVENTS if model.__name__.endswith("Event")]
    assert (title, set(rows)) == ("type", {get_args(kind.annotation)[0] for kind in kinds})


def test_the_page_reads_fields_that_there_are() -> None:
    known = {name for model in EVENTS for name in model.model_fields}
    script = (ROOT / "hippo/page/run.js").read_text("utf-8")
    assert set(re.findall(r"\bevent\.(\w+)", script)) - known == set()
