"""One timed question over REST, streamed: what a user would see."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: the client's clock for what a user waits, the gateway's for the decoding.

    The first piece of text reaches a client with a delay of its own, which would shorten the
    decoding by as much.
    """

    text: str
    token_ids: tuple[int, ...]
    end_to_end_s: float  # request sent to last token
    ttft_s: float  # request sent to first token
    figures: Mapping[str, Any]  # the gateway's `hippo` object
    num_prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, the end token included."""
        return len(self.token_ids)

    @property
    def decode_s(self) -> float:
        """First token to last."""
        return float(self.figures["timings_ms"]["decode"]) / 1e3


def video_url(path: Path) -> str:
    """The clip as a data: URL."""
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()


def user_turn(video: str | None, question: str, *, is_video_first: bool = True) -> dict[str, Any]:
    """A message that asks about a video, or about nothing."""
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
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    is_video_first: bool = True,
    has_timeline: bool = False,
) -> Answer:
    """One question, which nothing that was asked before helps; see ``converse``."""
    return converse(
        client,
        [user_turn(video, question, is_video_first=is_video_first)],
        speculative=speculative,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        has_timeline=has_timeline,
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
) -> Answer:
    """Streams one answer; raises RuntimeError with the server's message on an error.

    What was cached before helps only if it was asked for with the same ``cache_salt``.
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
        "cache_salt": cache_salt or uuid.uuid4().hex,
        "speculative": dict(speculative),
    }
    payload = json.dumps(body).encode()
    text: list[str] = []
    first = last = 0.0
    figures: Mapping[str, Any] = {}
    usage: Mapping[str, Any] = {"prompt_tokens": 0}
    token_ids: tuple[int, ...] = ()
    start = time.perf_counter()
    headers = {"content-type": "application/json"}
    with client.stream(
        "POST", "/v1/chat/completions", content=payload, headers=headers
    ) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or now
                    last = now
                    text.append(piece)
                token_ids = tuple(choice.get("token_ids") or token_ids)
            figures = chunk.get("hippo") or figures
            usage = chunk.get("usage") or usage
    return Answer(
        text="".join(text),
        token_ids=token_ids,
        end_to_end_s=last - start,
        ttft_s=first - start,
        figures=figures,
        num_prompt_tokens=int(usage["prompt_tokens"]),
    )
