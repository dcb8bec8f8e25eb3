"""An OpenAI-compatible server of text that knows nothing of hippo, on a port of its own."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass(slots=True)
class PlainServer:
    """How it answers, and what it was asked."""

    models: Sequence[str] = ("plain",)
    pieces: Sequence[str] = ("One", " and", " two.")
    thought: str = ""  # before the pieces
    finish_reason: str = "stop"
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

    async def answer(self, request: Request) -> Response:
        """Answers any request."""
        body = await request.json() if request.method == "POST" else None
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return _refusal(401, "Incorrect API key provided")
        if body is not None:
            self.bodies.append(body)
            problem = self._problem(body, len(self.bodies) - 1)
            return problem or StreamingResponse(self._stream(body), media_type="text/event-stream")
        if request.url.path != "/v1/models":
            return _refusal(404, f"no {request.url.path} here")
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    def _problem(self, body: dict[str, Any], number: int) -> Response | None:
        refused = [name for name in self.unknown if name in body]
        if number in self.failing:
            return _refusal(self.failing_status, "all slots are taken")
        if refused:
            return _refusal(400, f"Unrecognized request argument supplied: {refused[0]}")
        if self.newer and "max_tokens" in body:
            words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return _refusal(400, words)
        if body["model"] not in self.models:
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        return None

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if self.thought:
                yield _event({"choices": [{"delta": {"reasoning": self.thought}}]})
            for piece in self.pieces:
                await asyncio.sleep(self.pause_s)
                yield _event({"choices": [{"delta": {"content": piece}}]})
        finally:
            self.num_open -= 1
        if self.is_cut_off:
            return
        last: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": self.finish_reason}]}
        if self.figures is not None:
            last["hippo"] = self.figures
            if body.get("return_token_ids"):
                last["choices"][0]["token_ids"] = list(range(len(self.pieces)))
        yield _event(last)
        if self.has_usage and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": 2 * len(self.pieces)}
            yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


@contextmanager
def serving(plain: PlainServer) -> Iterator[PlainServer]:
    """It listens while this lasts."""
    app = Starlette(routes=[Route("/{path:path}", plain.answer, methods=["GET", "POST"])])
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plain.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield plain
        finally:
            server.should_exit = True
            thread.join()


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)
