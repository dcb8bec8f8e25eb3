"""JSON of chat completions: the choices of an answer, and the server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"  # a comment, which clients skip
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects the stream defeats it
)

_to_json = json.JSONEncoder(separators=(",", ":")).encode


class ChunkWriter:
    """Writes the server-sent events of one streamed completion.

    ``head`` holds the fields that all chunks have in common. With ``include_usage`` each chunk has
    a ``usage``, null where none is given.
    """

    def __init__(self, head: dict[str, Any], *, include_usage: bool) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        self._include_usage = include_usage

    def chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: Sequence[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
        token_ids: list[int] | None = None,
        usage: dict[str, Any] | None = None,
        reports: dict[str, Any] | None = None,
        events: Sequence[dict[str, Any]] = (),
    ) -> bytes:
        """Returns a chunk with new text; a choice's last one has its finish reason and reports."""
        choice = choice_json(
            index,
            {"delta": delta},
            logprobs=logprobs,
            finish_reason=finish_reason,
            token_ids=token_ids,
        )
        if events:
            choice["events"] = list(events)
        return self._event({"choices": [choice], **(reports or {})}, usage)

    def end_stream(self, *, usage: dict[str, Any], metrics: dict[str, Any]) -> bytes:
        """Returns the end of the stream, after a usage chunk if ``include_usage``."""
        if not self._include_usage:
            return DONE
        return self._event({"choices": [], "metrics": metrics}, usage) + DONE

    def _event(self, fields: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
        if self._include_usage:
            fields["usage"] = usage
        return event({**self._head, **fields})


def event(data: dict[str, Any]) -> bytes:
    """Returns one server-sent event."""
    return f"data: {_to_json(data)}\n\n".encode()


def choice_json(
    index: int,
    content: dict[str, Any],
    *,
    logprobs: Sequence[dict[str, Any]] | None,
    finish_reason: str | None,
    token_ids: list[int] | None,
) -> dict[str, Any]:
    """Returns one item of ``choices``; ``content`` holds its ``message`` or ``delta``."""
    choice: dict[str, Any] = {
        "index": index,
        **content,
        "logprobs": None if logprobs is None else {"content": list(logprobs), "refusal": None},
        "finish_reason": finish_reason,
    }
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return choice
