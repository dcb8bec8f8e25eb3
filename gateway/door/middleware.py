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

from gateway.common.budget import ByteBudget, Holding
from gateway.common.errors import (
    QUIET_PATHS,
    BodyEncodingError,
    BodyStalledError,
    BodyTooComplexError,
    BodyTooLargeError,
    error_body,
    error_response,
    internal_error,
)
from gateway.common.keys import Allowance, Keyring, RateLimitedError
from gateway.common.metrics import GatewayMetrics
from gateway.door.json_values import ValueCounter
from gateway.door.sites import GUARDS
from hippo.base.heap import trim_heap
from hippo.base.local_files import shorten
from hippo.base.logs import request_id_var
from hippo.base.tracing import NO_SPAN, Span, span

logger = logging.getLogger("gateway.access")

GUARDED = ("/v1/", "/tokenize", "/detokenize")
UPLOADS = "/v1/videos"
_FORM_OVERHEAD_BYTES = 1 << 16  # a form's other fields and headers
# uvicorn waits without end for a body's next byte; until then the bytes before are kept.
_LONGEST_PAUSE_S = 60.0
_SLOW_START_S = 30.0
_LEAST_RATE = 1 << 15  # bytes a second after the start: a quarter of a slow uplink (1 Mbit/s)
# Of a JSON body: parsed in some 0.1 s, and more than the longest lists of all fields together have.
_MOST_VALUES = 1 << 16
_LARGE_BYTES = 1 << 20  # whose memory is worth a call to give it back
_TRIM_AFTER_S = 0.1  # when nothing of the request is referred to any more
LEFT = 499
"""nginx's status for a client that left before the answer began."""
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
        budget: ByteBudget,
        metrics: GatewayMetrics,
    ) -> None:
        """``max_file_bytes`` limits the file of an upload, whose body is not held in memory; other
        bodies count for ``budget``."""
        self._app = app
        self._budget = budget
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
        status = LEFT
        body = _Body(scope, receive, self._limit_of(scope), self._budget)
        state["body"] = body

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in GUARDS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            if _declared_length(headers) > body.max_bytes:
                error = body.too_large()
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
            await self._app(scope, body.receive, named_send)
        except Exception as error:
            own.fail(error)
            # Handled here, where the request's id is still set for the log record.
            logger.exception("a request failed unexpectedly")
            if status != LEFT:
                raise  # the answer has begun, so the server cuts the connection
            await internal_error()(scope, receive, named_send)
        finally:
            body.release()
            extra: dict[str, object] = (
                {} if state.get("key") is None else {"key": state["key"].name}
            )
            elapsed_s = (time.monotonic_ns() - started_ns) / 1e9
            path = getattr(scope.get("route"), "path", "unknown")
            self._metrics.count_request(path, status)
            answered = None if status == LEFT else status
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

    def _limit_of(self, scope: Scope) -> tuple[int, bool]:
        """Returns the most bytes of a request's body or upload, and whether it is an upload."""
        is_upload = (scope["method"], scope["path"]) == ("POST", UPLOADS)
        return self._max_file_bytes if is_upload else self._max_body_bytes, is_upload


class _Body:
    """The body of a request: what it may be, how fast it comes, and what of it is held."""

    def __init__(
        self, scope: Scope, receive: Receive, limit: tuple[int, bool], budget: ByteBudget
    ) -> None:
        """``limit`` has the most bytes, and whether they are an upload's, which goes to disk."""
        self._scope = scope
        self._receive = receive
        self._limit, self._is_upload = limit
        self._budget = budget
        self._holding: Holding | None = None
        self._began_s = time.monotonic()
        self._num_received = 0
        self._values = ValueCounter()
        self._is_complete = False  # from then on ``receive`` waits for the client to leave
        self.max_bytes = self._limit + (_FORM_OVERHEAD_BYTES if self._is_upload else 0)

    @property
    def holding(self) -> Holding:
        """What the request holds in memory."""
        if self._holding is None:
            self._holding = Holding(self._budget, self.client)
        return self._holding

    @property
    def client(self) -> str:
        """Who sends the request: the name of its key, or else its address."""
        key: Allowance | None = self._scope["state"].get("key")
        address = (self._scope.get("client") or ("",))[0]
        return f"address {address}" if key is None else key.name

    async def receive(self) -> Message:
        """Returns the next message; raises HTTPException if the body is more than it may be."""
        message = await (self._receive() if self._is_complete else self._receive_in_time())
        self._is_complete = not message.get("more_body", False)
        if message["type"] == "http.request":
            piece: bytes = message.get("body", b"")
            self._num_received += len(piece)
            if self._num_received > self.max_bytes:
                raise self.too_large()
            if not self._is_upload:
                if b"\0" in piece:  # of UTF-16 and UTF-32, in which the counter sees no values
                    raise BodyEncodingError
                self.holding.take(len(piece))
                self._values.feed(piece)
                if self._values.num_values > _MOST_VALUES:
                    raise BodyTooComplexError(_MOST_VALUES)
        return message

    def too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(self._limit, is_upload=self._is_upload)

    def release(self) -> None:
        """Gives back what the request holds; returns the memory to the system if it was much."""
        if self._holding is None:
            return
        if self._holding.num_bytes > _LARGE_BYTES:
            loop = asyncio.get_running_loop()
            loop.call_later(_TRIM_AFTER_S, loop.run_in_executor, None, trim_heap)
        self._holding.release()

    async def _receive_in_time(self) -> Message:
        elapsed_s = time.monotonic() - self._began_s
        left_s = _SLOW_START_S + self._num_received / _LEAST_RATE - elapsed_s
        try:
            async with asyncio.timeout(min(_LONGEST_PAUSE_S, left_s)):
                return await self._receive()
        except TimeoutError:
            raise BodyStalledError(
                f"{self._num_received:,} bytes of the request body have come in "
                f"{time.monotonic() - self._began_s:.0f} s, and more were to come; after "
                f"{_SLOW_START_S:g} s at least {_LEAST_RATE:,} a second are needed"
            ) from None


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
    """Checks the API key and its limits on guarded paths, before the body is read.

    Each POST counts as a request. The request's ``state.key`` is the key's allowance, and
    ``state.admission`` what counts it; both are None where no key is needed.
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
            scope.setdefault("state", {}).update(key=allowance, admission=None)
            if allowance is not None and scope["method"] == "POST":
                await self._admit(allowance, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admit(
        self, allowance: Allowance, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            admission = allowance.admit()
        except RateLimitedError as error:
            refusal = error_response(error, path=scope["path"])
            refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
            return

        async def send_releasing(message: Message) -> None:
            # Before the last byte: a client that has its answer may ask again at once.
            if message["type"] == "http.response.body" and not message.get("more_body"):
                admission.release()
            await send(message)

        scope["state"]["admission"] = admission
        with admission:
            await self._app(scope, receive, send_releasing)


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
