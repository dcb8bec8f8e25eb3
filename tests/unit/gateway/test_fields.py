"""A service's error is about the fields that the client sent."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.fields import in_clients_words
from gateway.schemas import ChatCompletionRequest
from hippo.errors import ContextLengthError, InvalidRequestError


def _parse(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    return ChatCompletionRequest.model_validate(body | fields)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_has_the_name_that_was_sent(name: str) -> None:
    error = ContextLengthError("max_tokens is 9; num_max_tokens", param="max_tokens")
    told = in_clients_words(error, _parse(**{name: 9}))
    assert type(told) is ContextLengthError
    assert (told.message, told.param) == (f"{name} is 9; num_max_tokens", name)


def test_other_fields_are_left_as_they_are() -> None:
    for param in ("temperature", None):
        told = in_clients_words(InvalidRequestError("too hot", param=param), _parse())
        assert (told.message, told.param) == ("too hot", param)
