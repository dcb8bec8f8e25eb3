"""An OpenAI-compatible server of text that knows nothing of hippo, on a port of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class PlainServer:
    """How it answers, and what it was asked."""

    models: Sequence[str] = ("plain",)
    pieces: Sequence[str] = ("One", " and", " two.")
    pause_s: float = 0.0  # before each piece
    api_key: str | None = None
    unknown: Sequence[str] = ()  # fields that it refuses by name
    newer: bool = False  # takes max_completion_tokens alone
    has_usage: bool = True
    figures: Mapping[str, Any] | None = None  # makes it look like a gateway of ours
    failing: Sequence[int] = ()  # numbers of the requests, from 0, that get ...
    failing_status: int = 503  # ... this status
    is_cut_off: bool = False  # the stream ends in its middle
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    num_open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(server: PlainServer) -> Iterator[PlainServer]:
    """It listens while this lasts."""

    class Handler(_Handler):
        plain = server

    with _Listener(("127.0.0.1", 0), Handler) as listener:
        server.url = f"http://127.0.0.1:{listener.server_port}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True  # of clients that keep their connection open
    block_on_close = False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    plain: PlainServer

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        if self.path != "/v1/models":
            self._send(404, {"error": {"message": f"no {self.path} here"}})
            return
        self._send(200, {"object": "list", "data": [{"id": name} for name in self.plain.models]})

    def do_POST(self) -> None:
        plain = self.plain
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._is_allowed():
            return
        with plain.lock:
            number = len(plain.bodies)
            plain.bodies.append(body)
            plain.num_open += 1
            plain.most_open = max(plain.most_open, plain.num_open)
        try:
            self._answer(body, number)
        finally:
            with plain.lock:
                plain.num_open -= 1

    def _answer(self, body: dict[str, Any], number: int) -> None:
        plain = self.plain
        refused = [name for name in plain.unknown if name in body]
        if number in plain.failing:
            self._send(plain.failing_status, {"error": {"message": "all slots are taken"}})
        elif refused:
            words = f"Unrecognized request argument supplied: {refused[0]}"
            self._send(400, {"error": {"message": words}})
        elif plain.newer and "max_tokens" in body:
            words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            self._send(400, {"error": {"message": words}})
        elif body["model"] not in plain.models:
            words = f"The model `{body['model']}` does not exist."
            self._send(404, {"error": {"message": words}})
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        plain = self.plain
        for piece in plain.pieces:
            time.sleep(plain.pause_s)
            self._event({"choices": [{"delta": {"content": piece}}]})
        if not plain.is_cut_off:
            last: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
            if plain.figures is not None:
                last["hippo"] = plain.figures
                if body.get("return_token_ids"):
                    last["choices"][0]["token_ids"] = list(range(len(plain.pieces)))
            self._event(last)
            if plain.has_usage and body.get("stream_options", {}).get("include_usage"):
                usage = {"prompt_tokens": 7, "completion_tokens": 2 * len(plain.pieces)}
                self._event({"choices": [], "usage": usage})
            self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, chunk: Mapping[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _is_allowed(self) -> bool:
        key = self.plain.api_key
        if key is None or self.headers["authorization"] == f"Bearer {key}":
            return True
        self._send(401, {"error": {"message": "Incorrect API key provided"}})
        return False

    def _send(self, status: int, document: Mapping[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Tests have no use for an access log."""
