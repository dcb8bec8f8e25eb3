"""The OpenAPI description (/openapi.json): FastAPI's, with errors, headers and streams."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gateway.api.responses import ChatCompletion, ChatCompletionChunk, ErrorResponse
from gateway.door.middleware import GUARDED

_SCHEMAS = "#/components/schemas/"


def _header(name: str, description: str, **schema: str) -> dict[str, Any]:
    told = {"description": description, "schema": {"type": "string", **schema}}
    return {name: {**told, "required": True}}


_REQUEST_ID = _header("X-Request-Id", "The request id that the client sent, or a generated one.")
_WAIT = "Seconds after which the request may be sent again."
_RETRY_AFTER = _header("Retry-After", _WAIT, pattern="^[0-9]+$")
_HEADERS = {
    401: _header("WWW-Authenticate", "How keys are sent."),
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
_MEANINGS = {
    400: "Malformed, out of range, not supported, or media that cannot be read.",
    401: "The API key is missing or unknown.",
    403: "A URL or path that this server does not allow, or a page of another site.",
    404: "No such model, video or path.",
    408: "The body comes too slowly, or not at all.",
    409: "Draft and target do not fit together.",
    413: "The body is larger than this server's limit, or has too many values.",
    429: "No slot is free and the queue is full, or a limit of the API key is reached.",
    500: "A fault of the server; its log has the details under the request's id.",
    503: "The target is down, loading or draining, or the memory for requests is full.",
    504: "The request took longer than this server allows.",
    507: "The uploads kept on this server leave no room for another one.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "model": ErrorResponse,
        "description": meaning,
        "headers": _HEADERS.get(status, {}),
    }
    for status, meaning in _MEANINGS.items()
}
"""The errors of all routes: the request, the services or the server may be at fault anywhere."""
_STREAM_EXAMPLE = (
    'data: {"id":"chatcmpl-0f6e","object":"chat.completion.chunk","created":1795278000,'
    '"model":"hippo","choices":[{"index":0,"delta":{"content":"A red"},"logprobs":null,'
    '"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
_JSON_TEXT = {"type": "string", "contentMediaType": "application/json"}
_EVENT = {
    "type": "object",
    "description": "Each event with stream: `data: ChatCompletionChunk`, and at the end "
    "`data: [DONE]`, or after a failure `data: ErrorResponse`. Lines that begin with a colon are "
    "comments.",
    "properties": {
        "data": {
            "anyOf": [
                {**_JSON_TEXT, "contentSchema": {"$ref": f"{_SCHEMAS}ChatCompletionChunk"}},
                {**_JSON_TEXT, "contentSchema": {"$ref": f"{_SCHEMAS}ErrorResponse"}},
                {"const": "[DONE]"},
            ]
        }
    },
    "required": ["data"],
}
CHAT_ANSWERED: dict[str, Any] = {
    "model": ChatCompletion,
    "content": {"text/event-stream": {"schema": _EVENT, "example": _STREAM_EXAMPLE}},
}


def describe_api(app: FastAPI, *, asks_for_keys: bool) -> dict[str, Any]:
    """Returns the OpenAPI document of the application."""
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
            operation["responses"].pop("422", None)  # an invalid value is answered with 400
            if asks_for_keys and path.startswith(GUARDED):
                operation["security"] = [{"ApiKey": []}]
            else:
                operation["responses"].pop("401", None)
            for response in operation["responses"].values():
                response["headers"] = response.get("headers", {}) | _REQUEST_ID
    if asks_for_keys:
        scheme = {"type": "http", "scheme": "bearer", "description": "One of the server's API keys"}
        document["components"]["securitySchemes"] = {"ApiKey": scheme}
    return document
