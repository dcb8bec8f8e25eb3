"""Any OpenAI-compatible server: its address, its models, and streamed answers."""

import io
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx

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

_PIECE_BYTES = 1 << 19
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
                f"{self.url!r} is no server's address; expected an address such as http://127.0.0.1:8000"
            )

    @property
    def path(self) -> str:
        """The path of the API, such as ``/v1``."""
        path = urlsplit(self.url).path.rstrip("/")
        return path if path.endswith("/v1") else path + "/v1"

    def connect(self) -> "Connection":
        return Connection(self)

    def models(self) -> list[str]:
        """Returns the names of the served models. Raises HippoError if it cannot get them."""
        with closing(self.connect()) as connection:
            status, data = connection.exchange("GET", "/models")
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


class Connection:
    """A connection that stays open between requests. Threads must not share it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        headers = {"accept": "text/event-stream, application/json", "accept-encoding": "identity"}
        if server.api_key is not None:
            headers["authorization"] = f"Bearer {server.api_key}"
        try:
            encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        except UnicodeEncodeError:
            raise InvalidRequestError(
                f"the API key has characters that HTTP cannot carry: give the key in ASCII "
                f"({KEY_VARIABLE})"
            ) from None
        parts = urlsplit(server.url)
        self._client = httpx.Client(
            base_url=parts._replace(path=server.path).geturl(),
            headers=encoded,
            timeout=server.timeout_s,
            limits=httpx.Limits(keepalive_expiry=None),
            trust_env=False,
            verify=ssl.create_default_context() if parts.scheme == "https" else False,
        )
        self._has_asked = False

    def ask(self, body: bytes, *, on_text: Callable[[str, bool], object] | None = None) -> Answer:
        """Sends a chat completion request and returns the answer.

        Data is stored with its arrival time and parsed only at the end, so that the client takes
        little time from a core that it may share with the server. ``on_text``, if given, is called
        with each piece of text on arrival, and whether it is a thought's. Raises the HippoError
        that fits the response's status, with the server's message.
        """
        parts: list[tuple[float, bytes]] = []
        shown = AnswerReader()
        with self._response("POST", "/chat/completions", body=body) as (asked_s, response):
            for data in response.iter_raw():
                parts.append((time.perf_counter(), data))
                if on_text is not None and response.status_code == 200:
                    for piece in shown.feed_data(data, 0.0):
                        on_text(*piece)
        whole = b"".join(data for _, data in parts)
        if response.status_code != 200:
            raise error_from(response.status_code, whole)
        if not any(line.startswith(b"data:") for line in whole.splitlines()):
            raise HippoError(f"the server did not stream its answer: {whole[:200]!r}")
        return read_answer(parts, asked_s=asked_s)

    def exchange(self, method: str, path: str, file: Path | None = None) -> tuple[int, bytes]:
        """Returns status and body of the response to a request below the API's path, which sends
        ``file``, if given, as a form. Raises UnavailableError, and InvalidRequestError for a file
        that cannot be read or changes meanwhile."""
        num_bytes = 0
        try:
            with io.BytesIO() if file is None else file.open("rb") as opened:
                num_bytes = 0 if file is None else file.stat().st_size
                sent = None if file is None else opened
                with self._response(method, path, file=sent) as (_, response):
                    return response.status_code, response.read()
        except OSError as error:
            raise InvalidRequestError(f"{file} cannot be read: {error.strerror}") from None
        except Exception:  # h11's, if there are not as many bytes as the head has announced
            if file is None or (file.exists() and file.stat().st_size == num_bytes):
                raise
            raise InvalidRequestError(f"{file} was changed while it was sent") from None

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _response(
        self, method: str, path: str, *, body: bytes | None = None, file: BinaryIO | None = None
    ) -> Iterator[tuple[float, httpx.Response]]:
        """Yields the time of sending, and the response before its body is read. Raises
        UnavailableError, also for an httpx.TransportError of the ``with`` block."""
        response = None
        try:
            while response is None:
                request = self._request(method, path, body, file)
                asked_s = time.perf_counter()
                try:
                    response = self._client.send(request, stream=True)
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    # A server may close an idle connection just before this request.
                    if not self._has_asked:
                        raise
                    self._has_asked = False
            self._has_asked = response.headers.get("connection", "").lower() != "close"
            with closing(response):
                yield asked_s, response
        except httpx.TransportError as error:
            raise self._lost(error) from None

    def _request(
        self, method: str, path: str, body: bytes | None, file: BinaryIO | None
    ) -> httpx.Request:
        if body is not None:
            # In pieces: of one large body httpx would copy the rest at each write.
            starts = range(0, len(body), _PIECE_BYTES)
            pieces = (body[start : start + _PIECE_BYTES] for start in starts)
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            return self._client.build_request(method, path, content=pieces, headers=headers)
        files = None
        if file is not None:
            file.seek(0)
            files = {"file": file}
        return self._client.build_request(method, path, files=files)

    def _lost(self, error: httpx.TransportError) -> UnavailableError:
        url = self._server.url
        if isinstance(error, httpx.ConnectError) and "refused" in str(error):
            return UnavailableError(f"nothing listens at {url}; start a pair with `hippo up`")
        if isinstance(error, httpx.TimeoutException):
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
