"""Questions over REST, streamed and timed."""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from hippo.benchmark.answers import AnswerReader
from hippo.errors import HippoError, InvalidRequestError, UnavailableError

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """One answer, with this side's clock and the gateway's figures."""

    text: str
    num_tokens: int
    finish_reason: str
    end_to_end_s: float  # request sent to last byte
    first_text_s: float
    figures: Mapping[str, Any]  # the answer's `hippo` object

    @property
    def decode_s(self) -> float:
        """First token to last, by the gateway's clock."""
        return float(self.figures["timings_ms"]["decode"]) / 1e3


def media_part(video: str) -> dict[str, Any]:
    """A content part for a file on this machine (sent whole) or a URL (fetched there).

    Raises InvalidRequestError for a file that cannot be read.
    """
    suffix = Path(video).suffix.lower()
    kind = "image" if suffix in _IMAGE_SUFFIXES else "video"
    url = video
    if not video.startswith(("http://", "https://", "data:", "file://")):
        try:
            data = Path(video).expanduser().read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{video} cannot be read: {error.strerror}") from None
        media_type = mimetypes.guess_type(video)[0] or ""
        if not media_type.startswith(kind + "/"):
            media_type = f"{kind}/mp4" if kind == "video" else f"{kind}/jpeg"
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def served_model(client: httpx.Client) -> str:
    """The name of the model behind ``client``. Raises UnavailableError if nobody answers."""
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise UnavailableError(
            f"no gateway answers at {client.base_url} ({error}); start one with `hippo up`"
        ) from None
    if response.status_code != 200:
        raise _error_from(response.content)
    return str(response.json()["data"][0]["id"])


def ask(
    client: httpx.Client,
    body: Mapping[str, Any],
    *,
    on_text: Callable[[str], None] = lambda text: None,
) -> ShownAnswer:
    """Streams one answer. Raises HippoError with the server's message."""
    payload = json.dumps(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    headers = {"content-type": "application/json"}
    reader = AnswerReader()
    start = time.perf_counter()
    try:
        with client.stream(
            "POST", "/v1/chat/completions", content=payload, headers=headers
        ) as response:
            if response.status_code != 200:
                raise _error_from(response.read())
            for data in response.iter_raw():
                for piece in reader.feed(data, time.perf_counter()):
                    on_text(piece)
    except httpx.HTTPError as error:
        raise UnavailableError(f"the connection to {client.base_url} failed: {error}") from None
    end_to_end_s = time.perf_counter() - start
    streamed = reader.answer(start)
    return ShownAnswer(
        text=streamed.text,
        num_tokens=streamed.num_tokens,
        finish_reason=streamed.finish_reason,
        end_to_end_s=end_to_end_s,
        first_text_s=streamed.ttft_s,
        figures=streamed.figures,
    )


def _error_from(content: bytes) -> HippoError:
    try:
        return HippoError(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return HippoError(f"unexpected answer: {content[:200]!r}")
