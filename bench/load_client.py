"""Concurrent clients in a closed loop: each asks again when its last answer is there."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.client import video_url
from bench.clips import Clip

_READ_BYTES = 1 << 16
_TIMEOUT_S = 600.0
_ANY_SALT = "a salt of its own"  # stands for it in a body that is sent many times


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """One answer under load; times are seconds of one monotonic clock, the client's."""

    clip_index: int
    asked_s: float
    piece_s: tuple[float, ...]  # when each piece of text came
    token_ids: tuple[int, ...]
    figures: Mapping[str, Any]  # the gateway's `hippo` object

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, the end token included."""
        return len(self.token_ids)

    @property
    def ended_s(self) -> float:
        """When its last piece came."""
        return self.piece_s[-1]

    @property
    def ttft_s(self) -> float:
        """Request sent to first piece of text."""
        return self.piece_s[0] - self.asked_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first: first piece to last, over the tokens between."""
        return (self.ended_s - self.piece_s[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times from one piece of text to the next: what a reader sees as stuttering."""
        return [after - before for before, after in itertools.pairwise(self.piece_s)]


@dataclass(slots=True)
class LoadRun:
    """What a closed loop gave: answers in the order in which they ended.

    The first ``num_warm`` are not counted: the loop begins with all clients in their prefill at
    once, which no later moment resembles.
    """

    num_warm: int
    answers: list[LoadAnswer] = field(default_factory=list)

    @property
    def counted(self) -> list[LoadAnswer]:
        """The answers that ended inside the window."""
        return self.answers[self.num_warm :]

    @property
    def seconds(self) -> float:
        """Length of the window: from the end of the last warm answer to that of the last."""
        return self.answers[-1].ended_s - self.answers[self.num_warm - 1].ended_s


def request_body(
    clip: Clip, *, speculative: Mapping[str, Any], max_tokens: int, temperature: float, seed: int
) -> bytes:
    """The question about a clip as a streamed chat completion; see ``salted``."""
    content: list[dict[str, Any]] = [{"type": "text", "text": clip.question}]
    video = {"type": "video_url", "video_url": {"url": video_url(clip.path)}}
    content.insert(0 if clip.is_video_first else 1, video)
    body = {
        "model": "hippo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": _ANY_SALT,
        "speculative": dict(speculative),
    }
    return json.dumps(body).encode()


def salted(body: bytes) -> bytes:
    """A request body with a salt of its own: nothing that was asked before helps it."""
    return body.replace(_ANY_SALT.encode(), uuid.uuid4().hex.encode())


def run_closed_loop(
    urls: Sequence[str],
    bodies: Sequence[bytes],
    *,
    num_clients: int,
    num_answers: int,
    on_start: Callable[[], None] = lambda: None,
    on_answer: Callable[[], None] = lambda: None,
) -> LoadRun:
    """Asks until ``num_answers`` have ended after the first ``num_clients``; returns all of them.

    Clients take questions in turn and servers (``urls``) round robin. ``on_start`` is called when
    the window begins, ``on_answer`` after each answer. What is still being answered then is waited
    for, so that the next run finds idle servers, but not returned. Raises RuntimeError with the
    server's message on an error.
    """
    loop = _ClosedLoop(urls, bodies, num_clients, num_answers, on_start, on_answer)
    threads = [
        threading.Thread(target=loop.client, args=(number,), name=f"client-{number}")
        for number in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if loop.error is not None:
        raise RuntimeError(f"a client failed: {loop.error}") from loop.error
    return loop.run


class _ClosedLoop:
    def __init__(
        self,
        urls: Sequence[str],
        bodies: Sequence[bytes],
        num_clients: int,
        num_answers: int,
        on_start: Callable[[], None],
        on_answer: Callable[[], None],
    ) -> None:
        self._urls = urls
        self._bodies = bodies
        self._most = num_clients + num_answers
        self._on_start = on_start
        self._on_answer = on_answer
        self._questions = itertools.count()
        self._lock = threading.Lock()
        self.run = LoadRun(num_warm=num_clients)
        self.error: Exception | None = None

    def client(self, number: int) -> None:
        """One client's thread; servers are shared out by client, so that connections stay open."""
        connection = http.client.HTTPConnection(
            urlsplit(self._urls[number % len(self._urls)]).netloc, timeout=_TIMEOUT_S
        )
        try:
            while self.error is None and len(self.run.answers) < self._most:
                index = next(self._questions) % len(self._bodies)
                self._add(ask(connection, salted(self._bodies[index]), clip_index=index))
        except Exception as error:
            self.error = error
        finally:
            connection.close()

    def _add(self, answer: LoadAnswer) -> None:
        with self._lock:
            if len(self.run.answers) >= self._most:
                return
            self.run.answers.append(answer)
            if len(self.run.answers) == self.run.num_warm:
                self._on_start()
            self._on_answer()


def ask(connection: http.client.HTTPConnection, body: bytes, *, clip_index: int) -> LoadAnswer:
    """Streams one answer. What comes is only stored with its time, and read when all is there:
    the client takes little from the core that it shares with a server."""
    asked_s = time.perf_counter()
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body=body, headers=headers)
    response = connection.getresponse()
    parts: list[tuple[float, bytes]] = []
    while data := response.read1(_READ_BYTES):
        parts.append((time.perf_counter(), data))
    if response.status != 200:
        text = b"".join(data for _, data in parts).decode("utf-8", "replace")
        raise RuntimeError(f"{response.status}: {text}")
    return read_answer(parts, clip_index=clip_index, asked_s=asked_s)


def read_answer(
    parts: Sequence[tuple[float, bytes]], *, clip_index: int, asked_s: float
) -> LoadAnswer:
    """The answer that a stream's bytes hold, each part with the time at which it came.

    Raises RuntimeError for a stream that ends in an error or without an answer.
    """
    pieces: list[float] = []
    token_ids: tuple[int, ...] = ()
    figures: Mapping[str, Any] = {}
    rest = b""
    for at_s, data in parts:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    pieces.append(at_s)
                token_ids = tuple(choice.get("token_ids") or token_ids)
            figures = chunk.get("hippo") or figures
    if not (pieces and token_ids):
        raise RuntimeError("the stream ended without an answer")
    return LoadAnswer(clip_index, asked_s, tuple(pieces), token_ids, figures)
