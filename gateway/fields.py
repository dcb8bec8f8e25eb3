"""Fields as the client named them, in what a service says about its request."""

from __future__ import annotations

import re

from gateway.schemas import ChatCompletionRequest
from hippo.errors import InvalidRequestError


def limit_field(request: ChatCompletionRequest) -> str:
    """The one of OpenAI's two names for the token limit that the client knows of."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def in_clients_words(
    error: InvalidRequestError, request: ChatCompletionRequest
) -> InvalidRequestError:
    """A service's error with the protocol's names replaced, in its text as in ``param``."""
    names = {"max_tokens": limit_field(request)}
    pattern = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, names)) + r")(?!\w)")
    message = pattern.sub(lambda found: names[found[1]], error.message)
    return type(error)(message, param=names.get(error.param or "", error.param))
