"""docs/api.md names every field of a request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from gateway.api import media_schemas, schemas, structured

PAGE = (Path(__file__).parents[4] / "docs/api.md").read_text(encoding="utf-8")
MODELS = [
    model
    for model in {**vars(media_schemas), **vars(structured), **vars(schemas)}.values()
    if isinstance(model, type) and issubclass(model, BaseModel) and model.model_fields
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.__name__))
def test_every_field_of_a_request_is_on_the_page(model: type[BaseModel]) -> None:
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE))))
    assert set(model.model_fields) - told == set()
