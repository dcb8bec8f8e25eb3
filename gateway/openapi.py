"""The description of the interface (/openapi.json): what FastAPI finds out, and what it cannot."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gateway.middleware import GUARDED
from gateway.responses import ChatCompletion, ChatCompletionChunk, ErrorResponse

Responses = dict[int | str, dict[str, Any]]

_SCHEMAS = "#/components/schemas/"
_REQUEST_ID = {
    "X-Request-Id": {
        "description": "The request's own id, or the one that it was given here.",
        "required": True,
        "schema": {"type": "string"},
    }
}
_RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds after which it may be tried again.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    }
}
_MEANINGS = {
    400: "Malformed, out of range, not supported, or media that cannot be read.",
    403: "A URL or path outside what is allowed.",
    404: "No such model, video or path.",
    409: "Draft and target do not fit together.",
    413: "The body is larger than this server takes.",
    429: "No slot is free and the queue is full, or a limit of the API key is reached.",
    500: "A fault of the server; its log has it under the request's id.",
    503: "The target is down, loading or draining.",
    504: "It took longer than this server allows.",
    507: "The uploads that are kept leave no room for this one.",
}
_STREAM_EXAMPLE = (
    'data: {"id":"chatcmpl-0f6e","object":"chat.completion.chunk","created":1795278000,'
    '"model":"hippo","choices":[{"index":0,"delta":{"content":"A red"},"logprobs":null,'
    '"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)

ANSWERED: dict[str, Any] = {"description": "The answer.", "headers": _REQUEST_ID}
CHAT_ANSWERED: dict[str, Any] = {
    **ANSWERED,
    "model": ChatCompletion,
    "content": {
        "text/event-stream": {
            "schema": {
                "type": "string",
                "description": "With stream: events `data: ChatCompletionChunk`, then "
                "`data: [DONE]`. A failure in mid-answer is a last event `data: ErrorResponse` "
                "instead. Lines that begin with a colon are comments.",
                "x-event-schema": {"$ref": _SCHEMAS + "ChatCompletionChunk"},
            },
            "example": _STREAM_EXAMPLE,
        }
    },
}


def answers(*statuses: int, ok: dict[str, Any] = ANSWERED) -> Responses:
    """The ``responses`` of a route: 200, and errors of these statuses."""
    return {
        200: ok,
        **{
            status: {
                "model": ErrorResponse,
                "description": _MEANINGS[status],
                "headers": _REQUEST_ID | (_RETRY_AFTER if status in (429, 503) else {}),
            }
            for status in statuses
        },
    }


def describe(app: FastAPI, *, asks_for_keys: bool) -> dict[str, Any]:
    """The OpenAPI document."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description="OpenAI's chat completions for videos. A request is refused by name for a "
        "field that would change the answer and is not supported.",
        routes=app.routes,
    )
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _, chunk = models_json_schema(
        [(ChatCompletionChunk, "serialization")], ref_template=_SCHEMAS + "{model}"
    )
    for name, schema in chunk["$defs"].items():
        schemas.setdefault(name, schema)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # a wrong value is a 400 here
            if asks_for_keys and path.startswith(GUARDED):
                operation["security"] = [{"ApiKey": []}]
                operation["responses"]["401"] = _unauthorized()
    if asks_for_keys:
        scheme = {"type": "http", "scheme": "bearer", "description": "One of the server's API keys"}
        document["components"]["securitySchemes"] = {"ApiKey": scheme}
    return document


def _unauthorized() -> dict[str, Any]:
    return {
        "description": "No API key, or one that is not known here.",
        "headers": {
            **_REQUEST_ID,
            "WWW-Authenticate": {"required": True, "schema": {"type": "string"}},
        },
        "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "ErrorResponse"}}},
    }
