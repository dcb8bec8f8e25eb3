"""Any OpenAI-compatible server: its address, its models, and streamed answers."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from hippo.client.answers import Answer, AnswerReader, error_message, read_answer
from hippo.errors import (
    ForbiddenError,
    HippoError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)

KEY_VARIABLE = "HIPPO_API_KEY"
"""Environment variable with the API key for the commands."""

_READ_BYTES = 1 << 16
_ERRORS: Mapping[int, type[HippoError]] = {
    400: InvalidRequestError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    413: InvalidRequestError,
    422: InvalidRequestError,
    429: OverloadedError,
    502: UnavailableError,
    503: UnavailableError,
}


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address and how to connect to it.

    ``/v1`` is appended to ``url`` unless it ends so. Raises InvalidRequestError if ``url`` is not a
    server's address.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0  # per read; a prefill may be long

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port  # raises ValueError if it is not a number
        except ValueError:
            is_address = False
        if not is_address or parts.username or parts.query or parts.fragment:
            raise InvalidRequestError(
                f"{self.url!r} is no server's address; expected one such as http://127.0.0.1:8000"
            )

    @property
    def path(self) -> str:
        """The path of the API, such as ``/v1``."""
        path = urlsplit(self.url).path.rstrip("/")
        return path if path.endswith("/v1") else path + "/v1"

    def connect(self) -> Connection:
        """Returns a connection, which opens at its first request."""
        return Connection(self)

    def models(self) -> list[str]:
        """Returns the names of the served models. Raises HippoError if it cannot get them."""
        connection = self.connect()
        try:
            status, data = connection.get("/models")
        finally:
            connection.close()
        where = f"{self.url.rstrip('/')} (asked for {self.path}/models)"
        if status != 200:
            error = error_from(status, data)
            if isinstance(error, ForbiddenError | UnavailableError):
                raise error
            raise NotFoundError(f"there is no OpenAI-compatible server at {where}: status {status}")
        try:
            return [str(model["id"]) for model in json.loads(data)["data"]]
        except (ValueError, KeyError, TypeError):
            raise NotFoundError(
                f"there is no OpenAI-compatible server at {where}: its answer is no list of models"
            ) from None


class Form(Protocol):
    """A body that is made while it is sent."""

    content_type: str

    @property
    def content_length(self) -> int:
        """Bytes of all pieces."""
        ...

    def __iter__(self) -> Iterator[bytes]: ...


class Connection:
    """A connection that stays open between requests. Threads must not share it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        parts = urlsplit(server.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert parts.hostname is not None
        self._connection = kind(parts.hostname, parts.port, timeout=server.timeout_s)

    def ask(self, body: bytes, *, on_text: Callable[[str], None] | None = None) -> Answer:
        """Sends a request whose ``stream`` is true; returns the answer.

        Data is stored with its arrival time and parsed only at the end, so that the client takes
        little time from a core that it may share with the server. ``on_text``, if given, is called
        with each piece of text on arrival. Raises the HippoError that fits the response's status,
        with the server's message.
        """
        asked_s, response = self._request("POST", "/chat/completions", body)
        parts: list[tuple[float, bytes]] = []
        shown = AnswerReader()
        try:
            while data := self._read(response):
                parts.append((time.perf_counter(), data))
                if on_text is not None and response.status == 200:
                    for piece in shown.feed_data(data, 0.0):
                        on_text(piece)
        except BaseException:
            self.close()  # the rest of the response is unread
            raise
        response.close()  # read1() does not notice the end of a content of known length
        whole = b"".join(data for _, data in parts)
        if response.status != 200:
            raise error_from(response.status, whole)
        if not any(line.startswith(b"data:") for line in whole.splitlines()):
            raise HippoError(f"the server did not stream its answer: {whole[:200]!r}")
        return read_answer(parts, asked_s=asked_s)

    def get(self, path: str) -> tuple[int, bytes]:
        """Returns status and body of a path below the API's. Raises UnavailableError."""
        return self.send("GET", path)

    def send(self, method: str, path: str, form: Form | None = None) -> tuple[int, bytes]:
        """Returns status and body of the response to a request below the API's path. Raises
        UnavailableError."""
        _, response = self._request(method, path, form)
        try:
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None

    def close(self) -> None:
        """Closes the connection; the next request opens it again."""
        self._connection.close()

    def _request(
        self, method: str, path: str, body: bytes | Form | None
    ) -> tuple[float, http.client.HTTPResponse]:
        """Returns the time of sending, and the response before its body is read."""
        headers = {"accept": "text/event-stream, application/json"}
        if isinstance(body, bytes):
            headers["content-type"] = "application/json"
        elif body is not None:
            headers["content-type"] = body.content_type
            headers["content-length"] = str(body.content_length)
        if self._server.api_key is not None:
            headers["authorization"] = f"Bearer {self._server.api_key}"
        was_open = self._connection.sock is not None
        while True:
            asked_s = time.perf_counter()
            try:
                self._send(method, self._server.path + path, body, headers)
                return asked_s, self._connection.getresponse()
            except HippoError:  # the body cannot be made
                self.close()
                raise
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # A server may close an idle connection just before this request.
                if not (was_open and isinstance(error, ConnectionError)):
                    raise self._lost(error) from None
                was_open = False

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(_READ_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None

    def _send(
        self, method: str, path: str, body: bytes | Form | None, headers: Mapping[str, str]
    ) -> None:
        try:
            self._connection.request(method, path, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses a large body answers before it has read it, and then closes.
            if self._connection.sock is None:
                raise

    def _lost(self, error: Exception) -> UnavailableError:
        url = self._server.url
        if isinstance(error, ConnectionRefusedError):
            return UnavailableError(f"nothing listens at {url}; start a pair with `hippo up`")
        if isinstance(error, TimeoutError):
            return UnavailableError(f"{url} did not answer within {self._server.timeout_s:g} s")
        return UnavailableError(f"the connection to {url} failed: {error or type(error).__name__}")


def error_from(status: int, content: bytes) -> HippoError:
    """Returns the error for a status other than 200, with the server's message."""
    try:
        message = error_message(json.loads(content))
    except ValueError:
        message = None
    words = message or content[:200].decode("utf-8", "replace").strip() or "no reason given"
    return _ERRORS.get(status, HippoError)(f"the server answered {status}: {words}")
