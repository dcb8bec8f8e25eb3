"""Answers failures with OpenAI's object: {"error": {"message", "type", "param", "code"}}."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.common.keys import RateLimitedError
from hippo.base.tracing import current_span
from hippo.errors import (
    ContextLengthError,
    DeadlineError,
    ForbiddenError,
    HippoError,
    IncompatiblePairError,
    MediaError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)

logger = logging.getLogger("gateway")

INTERNAL_ERROR = "an internal error occurred; it is in the server's log"

# Probes ask these every few seconds, so they are not logged at the usual level.
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served."""


# Error codes: OpenAI's where one fits, otherwise our own.
_CODES: dict[type[HippoError], str] = {
    ContextLengthError: "context_length_exceeded",
    MediaError: "invalid_media",
    ModelNotFoundError: "model_not_found",
    NotFoundError: "not_found",
    ForbiddenError: "media_not_allowed",
    RateLimitedError: "rate_limit_exceeded",
    OverloadedError: "overloaded",
    IncompatiblePairError: "incompatible_pair",
    UnavailableError: "unavailable",
    DeadlineError: "timeout",
}


# The limit, by pydantic's type of an error about a length.
_LENGTHS = {
    "too_long": "at most {max_length:,} are allowed",
    "too_short": "at least {min_length:,} must be there",
}
_NOUNS = {"messages": "messages", "stop": "stop strings"}
# "the target service at target:50051", and gRPC's "ipv4:10.0.0.3:50051: Connection refused".
_ADDRESS = re.compile(r" at \S+:\d+\b|\bipv[46]:\S+:\d+: ")


class RefusedError(HTTPException):
    """A request is refused before its route answers. It is no HippoError, because FastAPI lets only
    an HTTPException pass when it reads a body."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        type_name: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, {"connection": "close", **(headers or {})})
        self.code = code
        self.type_name = type_name

    def response(self) -> JSONResponse:
        """Returns the answer; the connection is closed, because a body may still be coming."""
        body = error_body(str(self.detail), self.code, type_name=self.type_name)
        return JSONResponse(body, status_code=self.status_code, headers=self.headers)


def error_body(
    message: str,
    code: str | None,
    *,
    type_name: str = "invalid_request_error",
    param: str | None = None,
) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    return {"error": {"message": message, "type": type_name, "param": param, "code": code}}


def describe_error(error: HippoError) -> dict[str, Any]:
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    message = error.message
    if isinstance(error, UnavailableError | IncompatiblePairError):
        message = without_addresses(message)
    return error_body(message, code, type_name=error.type_name, param=error.param)


def without_addresses(message: str) -> str:
    """Returns what clients are told of a service's problem: the log has its address, too."""
    return _ADDRESS.sub("", message)


def install_error_handlers(app: FastAPI) -> None:
    """Makes the application answer every failure with an error object."""
    app.add_exception_handler(HippoError, _on_hippo_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)


async def _on_hippo_error(request: Request, error: Any) -> JSONResponse:
    return error_response(error, path=request.url.path)


def error_response(error: HippoError, *, path: str) -> JSONResponse:
    """Returns the answer to a request for ``path``, which ``error`` has ended."""
    current_span().fail(error)
    if error.http_status >= 500 and path not in QUIET_PATHS:
        logger.warning("request failed: %s", error.message)
    headers = None
    if error.http_status in (429, 503):
        wait_s = error.retry_after_s if isinstance(error, OverloadedError) else 1.0
        headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return JSONResponse(describe_error(error), status_code=error.http_status, headers=headers)


async def _on_validation_error(request: Request, error: Any) -> JSONResponse:
    message, param = _explain(error.errors(), request)
    return JSONResponse(error_body(message, "invalid_value", param=param), status_code=400)


async def _on_http_error(request: Request, error: Any) -> JSONResponse:
    if isinstance(error, RefusedError):
        return error.response()
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"there is no {request.url.path} here; GET /docs lists what is", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} does not fit {request.url.path}; allowed: {allowed}"
        code = "method_not_allowed"
    body = error_body(message, code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def internal_error() -> JSONResponse:
    """Returns the answer to a request that failed unexpectedly, with status 500."""
    return JSONResponse(describe_error(HippoError(INTERNAL_ERROR)), status_code=500)


def _explain(errors: Sequence[Any], request: Request) -> tuple[str, str | None]:
    """Returns pydantic's first error as one sentence, and the path of the field at fault."""
    # If a value may have several types, the text was meant.
    first = next((each for each in errors if each["type"] == "string_unicode"), errors[0])
    if first["type"] == "json_invalid":
        reason, at = first["ctx"]["error"], first["loc"][-1]
        return f"the request body is not JSON: {reason} at character {at}", None
    content_type = request.headers.get("content-type", "")
    if len(first["loc"]) == 1 and "json" not in content_type:
        found = content_type or "missing"
        return f"the content type is {found!r}; expected application/json", None
    context = first.get("ctx") or {}
    path = [str(step) for step in first["loc"][1:]]
    if "field" in context:
        path.append(str(context["field"]))
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return f"{param} is not a known field; this server has no such option", param
    if first["type"] == "missing":
        return (f"{param} is required" if param else "the request needs a JSON body"), param
    if first["type"] == "string_unicode":
        fault = "has half of a surrogate pair (of an emoji that was cut?); send whole characters"
        return f"{param or 'the name of a field'} {fault}", param
    if first["type"] == "unsupported_field":
        return str(first["msg"]), param
    if first["type"] in _LENGTHS and context.get("actual_length") is not None:
        noun = _NOUNS.get(path[-1] if path else "", "entries")
        limit = _LENGTHS[first["type"]].format(**context)
        return f"{param} has {context['actual_length']:,} {noun}; {limit}", param
    if first["type"] == "string_too_long":
        limit = f"at most {context['max_length']:,} are allowed"
        return f"{param} has {len(first['input']):,} characters; {limit}", param
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    detail = str(first["msg"])
    detail = detail[0].lower() + detail[1:]
    if first["type"] == "unsupported":
        return (f"{param}: {detail}" if param else detail), param
    return f"{param} is {shown}: {detail}" if param else detail, param
