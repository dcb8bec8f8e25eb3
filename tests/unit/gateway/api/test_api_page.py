"""docs/api.md names every field of a request, of an answer's figures and of events."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from gateway.answer import event_schemas, figures
from gateway.api import media_schemas, schemas, structured

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
MODELS = [
    model
    for module in (media_schemas, structured, schemas, figures, event_schemas)
    for model in vars(module).values()
    if isinstance(model, type) and issubclass(model, BaseModel) and model.model_fields
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.__name__))
def test_every_field_is_in_the_document(model: type[BaseModel]) -> None:
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE))))
    assert set(model.model_fields) - told == set()


def test_every_kind_of_event_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.split("## Events of a stream")[1], re.MULTILINE)
    fields = [model.model_fields["type"] for model in MODELS if model.__name__.endswith("Event")]
    assert set(rows) == {get_args(field.annotation)[0] for field in fields}


def test_the_page_reads_fields_that_there_are() -> None:
    known = {name for model in MODELS for name in model.model_fields}
    script = (ROOT / "hippo/page/run.js").read_text(encoding="utf-8")
    assert set(re.findall(r"\bevent\.(\w+)", script)) - known == set()
