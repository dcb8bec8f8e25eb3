"""Middleware of all requests: request id, API key, body limit and access log."""

import asyncio
import contextlib
import functools
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.common.budget import ByteBudget, Holding
from gateway.common.errors import QUIET_PATHS, RefusedError, error_response, internal_error
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
# A JSON body of so many values is parsed in some 0.1 s; the longest lists of all fields have fewer.
_MOST_VALUES = 1 << 16
_LARGE_BYTES = 1 << 20  # a request of more bytes is worth a call that gives memory back
_TRIM_AFTER_S = 0.1  # when nothing of the request is referred to any more
LEFT = 499  # nginx's status for a client that left before the answer began
# OpenTelemetry's names of methods; another one, which a client may make up, is "_OTHER".
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_WITH_BODY = frozenset({"PATCH", "POST", "PUT"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestMiddleware:
    """Sets request ids, limits bodies, counts and logs requests.

    It is plain ASGI, so streams are not buffered. The routes see HEAD as GET: uvicorn leaves out
    the body.
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
            return
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        attributes = {"http.request.method": method, "url.path": scope["path"]}
        is_quiet = scope["path"] in QUIET_PATHS
        traced = span(method, kind="server", attributes=attributes, parent=Headers(scope=scope))
        with contextlib.nullcontext(NO_SPAN) if is_quiet else traced as own:
            await self._handle(scope, receive, send, own, method)

    async def _handle(
        self, scope: Scope, receive: Receive, send: Send, own: Span, method: str
    ) -> None:
        started_ns = time.monotonic_ns()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        body = _Body(scope, receive, self._budget, self._max_body_bytes, self._max_file_bytes)
        state |= {"request_id": request_id, "received_ns": started_ns, "body": body, "key": None}
        token = request_id_var.set(request_id)
        status = LEFT

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in GUARDS.items():
                    headers.setdefault(name, value)
            await send(message)

        seen = {**scope, "method": "GET"} if method == "HEAD" else scope
        try:
            body.check_head()
            await self._app(seen, body.receive, named_send)
        except RefusedError as error:
            await error.response()(scope, receive, named_send)
        except Exception as error:
            own.fail(error)
            # Handled here, where the request's id is still set for the log record.
            logger.exception("a request failed unexpectedly")
            if status != LEFT:
                raise  # the answer has begun, so the server cuts the connection
            await internal_error()(scope, receive, named_send)
        finally:
            body.release()
            path = getattr(seen.get("route"), "path", "unknown")
            self._metrics.count_request(path, status)
            key = None if state["key"] is None else state["key"].name
            answered = None if status == LEFT else status
            own.set(
                {
                    "http.route": path,
                    "http.response.status_code": answered,
                    "hippo.request_id": request_id,
                    "hippo.outcome": "cancelled" if answered is None else None,
                    "hippo.key": key,
                },
                name=f"{method} {path}",
            )
            elapsed_ms = round((time.monotonic_ns() - started_ns) / 1e6, 1)
            logger.log(
                logging.DEBUG if path in QUIET_PATHS else logging.INFO,
                "%s %s %d",
                scope["method"],
                scope["path"],
                status,
                extra={**({} if key is None else {"key": key}), "elapsed_ms": elapsed_ms},
            )
            request_id_var.reset(token)


class _Body:
    """The body of a request: what it may be, how fast it comes, and what of it is held."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        budget: ByteBudget,
        max_body_bytes: int,
        max_file_bytes: int,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._budget = budget
        self._is_upload = (scope["method"], scope["path"]) == ("POST", UPLOADS)
        self._limit = max_file_bytes if self._is_upload else max_body_bytes
        self._began_s = time.monotonic()
        self._num_received = 0
        self._values = ValueCounter()
        self._is_complete = False  # from then on ``receive`` waits for the client to leave

    @functools.cached_property  # the key of ``client`` is found after the body's head was checked
    def holding(self) -> Holding:
        """What the request holds in memory."""
        return Holding(self._budget, self.client)

    @property
    def client(self) -> str:
        """Who sends the request: the name of its key, or else its address."""
        key: Allowance | None = self._scope["state"]["key"]
        address = (self._scope.get("client") or ("",))[0]
        return f"address {address}" if key is None else key.name

    def check_head(self) -> None:
        """Raises RefusedError for a body that its head says to be too large or compressed."""
        headers = Headers(scope=self._scope)
        declared = headers.get("content-length", "")
        self._check_size(int(declared) if declared.isdigit() else 0)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity") and self._scope["method"] in _WITH_BODY:
            raise RefusedError(
                400,
                f"the request body is compressed ({shorten(encoding)}); this server reads none "
                "that is: send it without Content-Encoding",
            )

    async def receive(self) -> Message:
        """Returns the next message; raises RefusedError if the body is more than it may be."""
        message = await (self._receive() if self._is_complete else self._receive_in_time())
        self._is_complete = not message.get("more_body", False)
        if message["type"] == "http.request":
            piece: bytes = message.get("body", b"")
            self._num_received += len(piece)
            self._check_size(self._num_received)
            if not self._is_upload:
                if b"\0" in piece:  # in UTF-16 and UTF-32 the counter sees no values
                    told = "the request body is not UTF-8, as JSON must be (RFC 8259)"
                    raise RefusedError(400, told)
                self.holding.take(len(piece))
                self._values.feed(piece)
                if self._values.num_values > _MOST_VALUES:
                    told = f"the request body has more than {_MOST_VALUES:,} values; send fewer"
                    raise RefusedError(413, told, "body_too_large")
        return message

    def release(self) -> None:
        """Gives back what the request holds; returns the memory to the system if it was much."""
        if self.holding.num_bytes > _LARGE_BYTES:
            loop = asyncio.get_running_loop()
            loop.call_later(_TRIM_AFTER_S, loop.run_in_executor, None, trim_heap)
        self.holding.release()

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes <= self._limit + (_FORM_OVERHEAD_BYTES if self._is_upload else 0):
            return
        what, flag = "request body", "--max-body-bytes"
        remedy = "; upload a large video (POST /v1/videos), or name its path"
        if self._is_upload:
            what, flag, remedy = "video", "--max-media-bytes", ""
        told = (
            f"the {what} is larger than {self._limit} bytes, this server's limit ({flag}){remedy}"
        )
        raise RefusedError(413, told, "body_too_large")

    async def _receive_in_time(self) -> Message:
        elapsed_s = time.monotonic() - self._began_s
        left_s = _SLOW_START_S + self._num_received / _LEAST_RATE - elapsed_s
        try:
            async with asyncio.timeout(min(_LONGEST_PAUSE_S, left_s)):
                return await self._receive()
        except TimeoutError:
            raise RefusedError(
                408,
                f"{self._num_received:,} bytes of the request body have come in "
                f"{time.monotonic() - self._began_s:.0f} s, and more were to come; after "
                f"{_SLOW_START_S:g} s at least {_LEAST_RATE:,} a second are needed; send the "
                "request again",
                "body_stalled",
            ) from None


class KeyMiddleware:
    """Checks the API key and its limits on guarded paths, before the body is read.

    Each POST counts as a request. The request's ``state.key`` is the key's allowance, and
    ``state.admission`` what counts it; both are None where no key is needed. It needs
    ``RequestMiddleware`` around it.
    """

    def __init__(self, app: ASGIApp, *, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, admission = scope["state"], None
        try:
            if not self._keyring.is_open and scope["path"].startswith(GUARDED):
                state["key"] = self._allowance(Headers(scope=scope).get("authorization", ""))
                if scope["method"] == "POST":
                    admission = state["key"].admit()
        except (RefusedError, RateLimitedError) as error:  # answered here, within CORS
            if isinstance(error, RefusedError):
                refusal = error.response()
            else:
                refusal = error_response(error, path=scope["path"])
            refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
            return

        async def send_releasing(message: Message) -> None:
            # Before the last byte: a client that has its answer may ask again at once.
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if admission is not None and is_last:
                admission.release()
            await send(message)

        state["admission"] = admission
        with admission or contextlib.nullcontext():
            await self._app(scope, receive, send_releasing)

    def _allowance(self, authorization: str) -> Allowance:
        """Returns the allowance of the key in a header; raises RefusedError without a known key."""
        scheme, _, key = authorization.partition(" ")
        allowance = self._keyring.find(key.strip()) if scheme.lower() == "bearer" else None
        if allowance is not None:
            return allowance
        fault = "this API key is not known here" if key else "an API key is needed"
        raise RefusedError(
            401,
            f"{fault}: send the header 'Authorization: Bearer KEY'",
            "invalid_api_key",
            type_name="authentication_error",
            headers={"www-authenticate": "Bearer"},
        )
