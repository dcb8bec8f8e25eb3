"""Timed, streamed questions over REST."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from hippo.client.answers import Answer, read_answer
from hippo.client.server import error_from

__all__ = ["Answer", "ask", "converse", "user_turn", "video_url"]


def video_url(path: Path) -> str:
    """Returns the clip as a data: URL."""
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()


def user_turn(video: str | None, question: str, *, is_video_first: bool = True) -> dict[str, Any]:
    """Returns a user message with a question, and with a video if ``video`` is given."""
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if video is not None:
        place = 0 if is_video_first else 1
        content.insert(place, {"type": "video_url", "video_url": {"url": video}})
    return {"role": "user", "content": content}


def ask(
    client: httpx.Client,
    video: str | None,
    question: str,
    *,
    speculative: Mapping[str, Any],
    temperature: float = 0.0,
    seed: int = 0,
    is_video_first: bool = True,
    has_timeline: bool = False,
    on_edge: Callable[[], None] = lambda: None,
) -> Answer:
    """Asks one question without reuse of the server's caches; see ``converse``."""
    return converse(
        client,
        [user_turn(video, question, is_video_first=is_video_first)],
        speculative=speculative,
        temperature=temperature,
        seed=seed,
        has_timeline=has_timeline,
        on_edge=on_edge,
    )


def converse(
    client: httpx.Client,
    messages: Sequence[Mapping[str, Any]],
    *,
    speculative: Mapping[str, Any],
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    has_timeline: bool = False,
    cache_salt: str | None = None,
    ignores_end: bool = False,
    further: Mapping[str, Any] | None = None,
    on_edge: Callable[[], None] = lambda: None,
) -> Answer:
    """Streams one answer. Raises HippoError with the server's message on an error.

    The server reuses cached data only of requests with the same ``cache_salt`` (default: a new
    one). ``further`` are more fields of the request. ``on_edge`` is called after the first piece of
    text and after the last.
    """
    body = {
        "model": "hippo",
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_timeline": has_timeline,
        "ignore_eos": ignores_end,
        "cache_salt": cache_salt or uuid.uuid4().hex,
        "speculative": dict(speculative),
        **(further or {}),
    }
    payload = json.dumps(body).encode()
    parts: list[tuple[float, bytes]] = []
    start = time.perf_counter()
    headers = {"content-type": "application/json"}
    with client.stream(
        "POST", "/v1/chat/completions", content=payload, headers=headers
    ) as response:
        if response.status_code != 200:
            raise error_from(response.status_code, response.read())
        has_begun = False
        for data in response.iter_raw():
            parts.append((time.perf_counter(), data))
            if not has_begun and b'"delta":{"content":"' in data:
                has_begun = True
                on_edge()
            elif b'"hippo":' in data:
                on_edge()
    return read_answer(parts, asked_s=start)
