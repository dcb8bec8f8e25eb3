"""Chat completions on the wire: the chunks of a stream, and the whole object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"  # a comment, which readers of event streams skip
MEDIA_TYPE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as OpenAI's ``usage`` has them."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int  # of the prompt's, those that the target had already

    def to_json(self) -> dict[str, Any]:
        """The ``usage`` object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class ChunkWriter:
    """Writes the server-sent events of one streamed completion.

    Text chunks are spliced from a fixed frame: they are the only ones written per verdict.
    """

    def __init__(
        self, *, completion_id: str, created: int, model: str, include_usage: bool
    ) -> None:
        self._include_usage = include_usage
        self._head: dict[str, Any] = {
            "id": completion_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        opening = json.dumps(self._head, separators=(",", ":"))[:-1]
        self._before = f'data: {opening},"choices":[{{"index":0,"delta":{{"content":'
        self._after = ',"finish_reason":null}]'
        self._end = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def role(self, usage: Usage | None = None) -> bytes:
        """The first chunk."""
        choices = [_choice({"role": "assistant", "content": ""}, finish_reason=None)]
        return self._event({"choices": choices, **_usage_so_far(usage)})

    def text(
        self, piece: str, usage: Usage | None = None, *, logprobs: Sequence[dict[str, Any]] = ()
    ) -> bytes:
        """A chunk with further text, and with the usage so far where it is wanted."""
        likely = json.dumps(logprobs_json(logprobs), separators=(",", ":")) if logprobs else "null"
        end = self._end
        if usage is not None:
            end = f',"usage":{json.dumps(usage.to_json(), separators=(",", ":"))}}}\n\n'
        content = f'{json.dumps(piece)}}},"logprobs":{likely}'
        return f"{self._before}{content}{self._after}{end}".encode()

    def finish(
        self,
        *,
        finish_reason: str,
        usage: Usage,
        figures: dict[str, Any],
        metrics: dict[str, Any],
        token_ids: list[int] | None,
    ) -> bytes:
        """The chunk with the finish reason and the figures, the usage if wanted, and the end."""
        choice = _choice({}, finish_reason=finish_reason)
        if token_ids is not None:
            choice["token_ids"] = token_ids
        chunks = self._event({"choices": [choice], "hippo": figures, "metrics": metrics})
        if self._include_usage:
            chunks += self._event({"choices": [], "usage": usage.to_json(), "metrics": metrics})
        return chunks + DONE

    def error(self, error: dict[str, Any]) -> bytes:
        """An error after the stream has begun; nothing follows it."""
        return f"data: {json.dumps(error)}\n\n".encode()

    def _event(self, fields: dict[str, Any]) -> bytes:
        if self._include_usage:
            fields = {"usage": None, **fields}
        return f"data: {json.dumps({**self._head, **fields}, separators=(',', ':'))}\n\n".encode()


def completion_json(
    *,
    completion_id: str,
    created: int,
    model: str,
    text: str,
    finish_reason: str,
    usage: Usage,
    figures: dict[str, Any],
    metrics: dict[str, Any],
    token_ids: list[int] | None,
    logprobs: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    message = {"role": "assistant", "content": text, "refusal": None}
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": None if logprobs is None else logprobs_json(logprobs),
        "finish_reason": finish_reason,
    }
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage.to_json(),
        "hippo": figures,
        "metrics": metrics,
    }


def logprobs_json(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A choice's ``logprobs``."""
    return {"content": list(entries), "refusal": None}


def _usage_so_far(usage: Usage | None) -> dict[str, Any]:
    return {} if usage is None else {"usage": usage.to_json()}


def _choice(delta: dict[str, Any], *, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
