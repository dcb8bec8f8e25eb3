"""Middleware of all requests: request id, API key, body limit and access log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import (
    QUIET_PATHS,
    BodyStalledError,
    BodyTooLargeError,
    error_body,
    internal_error,
)
from gateway.keys import Keyring
from gateway.metrics import GatewayMetrics
from hippo.local_files import shorten
from hippo.logs import request_id_var
from hippo.tracing import NO_SPAN, Span, span

logger = logging.getLogger("gateway.access")

GUARDED = ("/v1/", "/tokenize", "/detokenize")
UPLOADS = "/v1/videos"
_FORM_OVERHEAD_BYTES = 1 << 16  # a form's other fields and headers
# uvicorn waits without end for a body's next byte; until then the bytes before are kept.
_LONGEST_PAUSE_S = 60.0
_LEFT = 499  # nginx's status for a client that left before the answer began
# OpenTelemetry's names of methods; another one, which a client may make up, is "_OTHER".
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_WITH_BODY = frozenset({"PATCH", "POST", "PUT"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestMiddleware:
    """Sets request ids, limits bodies, counts and logs requests.

    It is plain ASGI, so streams are not buffered.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        max_file_bytes: int,
        metrics: GatewayMetrics,
    ) -> None:
        """``max_file_bytes`` limits the file of an upload, whose body is not held in memory."""
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_file_bytes = max_file_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in QUIET_PATHS:
            await self._handle(scope, receive, send, NO_SPAN)
        else:
            method = _method(scope)
            attributes = {"http.request.method": method, "url.path": scope["path"]}
            with span(
                method, kind="server", attributes=attributes, parent=Headers(scope=scope)
            ) as own:
                await self._handle(scope, receive, send, own)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, own: Span) -> None:
        """Handles a request, whose span is ``own``."""
        started_ns = time.monotonic_ns()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"], state["received_ns"] = request_id, started_ns
        token = request_id_var.set(request_id)
        status = _LEFT
        num_received = 0
        is_complete = False  # the body; from then on ``receive`` waits for the client to leave
        is_upload = (scope["method"], scope["path"]) == ("POST", UPLOADS)
        limit = self._max_file_bytes if is_upload else self._max_body_bytes
        max_bytes = limit + _FORM_OVERHEAD_BYTES if is_upload else limit

        async def limited_receive() -> Message:
            nonlocal num_received, is_complete
            try:
                async with asyncio.timeout(None if is_complete else _LONGEST_PAUSE_S):
                    message = await receive()
            except TimeoutError:
                raise BodyStalledError(_LONGEST_PAUSE_S) from None
            is_complete = not message.get("more_body", False)
            if message["type"] == "http.request":
                num_received += len(message.get("body", b""))
                if num_received > max_bytes:
                    raise BodyTooLargeError(limit, is_upload=is_upload)
            return message

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            if _declared_length(headers) > max_bytes:
                error = BodyTooLargeError(limit, is_upload=is_upload)
                await _refusal(413, error.detail, code="body_too_large")(scope, receive, named_send)
                return
            encoding = headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ("", "identity") and scope["method"] in _WITH_BODY:
                detail = (
                    f"the request body is compressed ({shorten(encoding)}); this server reads none "
                    "that is: send it without Content-Encoding"
                )
                await _refusal(400, detail)(scope, receive, named_send)
                return
            await self._app(scope, limited_receive, named_send)
        except Exception as error:
            own.fail(error)
            # Handled here, where the request's id is still set for the log record.
            logger.exception("a request failed unexpectedly")
            if status != _LEFT:
                raise  # the answer has begun, so the server cuts the connection
            await internal_error()(scope, receive, named_send)
        finally:
            extra: dict[str, object] = (
                {} if state.get("key") is None else {"key": state["key"].name}
            )
            elapsed_s = (time.monotonic_ns() - started_ns) / 1e9
            path = getattr(scope.get("route"), "path", "unknown")
            self._metrics.count_request(path, status)
            answered = None if status == _LEFT else status
            own.set(
                {
                    "http.route": path,
                    "http.response.status_code": answered,
                    "hippo.request_id": request_id,
                    "hippo.outcome": "cancelled" if answered is None else None,
                    "hippo.key": extra.get("key"),
                },
                name=f"{_method(scope)} {path}",
            )
            level = logging.DEBUG if path in QUIET_PATHS else logging.INFO
            logger.log(
                level,
                "%s %s %d",
                scope["method"],
                scope["path"],
                status,
                extra={**extra, "elapsed_ms": round(elapsed_s * 1e3, 1)},
            )
            request_id_var.reset(token)


def _refusal(status: int, message: str, code: str | None = None) -> JSONResponse:
    """Returns the answer to a request whose body is not read."""
    body = error_body(message, type_name="invalid_request_error", code=code)
    return JSONResponse(body, status_code=status, headers={"connection": "close"})


class HeadMiddleware:
    """Answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        got = {**scope, "method": "GET"}

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._app(got, receive, send_head)
        finally:
            scope.update({name: got[name] for name in ("route", "endpoint") if name in got})


class KeyMiddleware:
    """Checks the API key on guarded paths, before the body is read.

    The request's ``state.key`` is the key's allowance, or None where no key is needed.
    """

    def __init__(self, app: ASGIApp, *, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            allowance = None
            if not self._keyring.is_open and scope["path"].startswith(GUARDED):
                scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
                if scheme.lower() == "bearer":
                    allowance = self._keyring.find(key.strip())
                if allowance is None:
                    await _unauthorized(has_key=bool(key))(scope, receive, send)
                    return
            scope.setdefault("state", {})["key"] = allowance
        await self._app(scope, receive, send)


def _unauthorized(*, has_key: bool) -> JSONResponse:
    fault = "this API key is not known here" if has_key else "an API key is needed"
    body = error_body(
        f"{fault}: send the header 'Authorization: Bearer KEY'",
        type_name="authentication_error",
        code="invalid_api_key",
    )
    headers = {"www-authenticate": "Bearer", "connection": "close"}
    return JSONResponse(body, status_code=401, headers=headers)


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "_OTHER"


def _declared_length(headers: Headers) -> int:
    declared = headers.get("content-length", "")
    return int(declared) if declared.isdigit() else 0
