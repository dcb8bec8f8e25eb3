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
        self._before = f'data: {opening},"choices":[{{"index":'
        self._after = ',"finish_reason":null}]'
        self._end = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def role(self, usage: Usage | None = None, *, num_choices: int = 1) -> bytes:
        """The first chunk of each choice."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._event({"choices": [_choice(index, delta)], **_usage_so_far(usage)})
            for index in range(num_choices)
        )

    def text(
        self,
        piece: str,
        usage: Usage | None = None,
        *,
        index: int = 0,
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> bytes:
        """A chunk with further text, and with the usage so far where it is wanted."""
        likely = json.dumps(logprobs_json(logprobs), separators=(",", ":")) if logprobs else "null"
        end = self._end
        if usage is not None:
            end = f',"usage":{json.dumps(usage.to_json(), separators=(",", ":"))}}}\n\n'
        content = f'{index},"delta":{{"content":{json.dumps(piece)}}},"logprobs":{likely}'
        return f"{self._before}{content}{self._after}{end}".encode()

    def finish(
        self,
        *,
        index: int = 0,
        finish_reason: str,
        figures: dict[str, Any],
        metrics: dict[str, Any],
        token_ids: list[int] | None,
        usage: Usage | None = None,
    ) -> bytes:
        """A choice's chunk with the finish reason and its figures."""
        choice = _choice(index, {}, finish_reason=finish_reason)
        if token_ids is not None:
            choice["token_ids"] = token_ids
        fields = {"choices": [choice], **_usage_so_far(usage)}
        return self._event({**fields, "hippo": figures, "metrics": metrics})

    def end(self, *, usage: Usage, metrics: dict[str, Any]) -> bytes:
        """After the last choice's: the usage if it is wanted, and the end."""
        if not self._include_usage:
            return DONE
        return self._event({"choices": [], "usage": usage.to_json(), "metrics": metrics}) + DONE

    def error(self, error: dict[str, Any]) -> bytes:
        """An error after the stream has begun; nothing follows it."""
        return f"data: {json.dumps(error)}\n\n".encode()

    def _event(self, fields: dict[str, Any]) -> bytes:
        if self._include_usage:
            fields = {"usage": None, **fields}
        return f"data: {json.dumps({**self._head, **fields}, separators=(',', ':'))}\n\n".encode()


def choice_json(
    *,
    index: int = 0,
    text: str,
    finish_reason: str,
    token_ids: list[int] | None,
    logprobs: Sequence[dict[str, Any]] | None = None,
    figures: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One of an answer's ``choices``, with its own figures where there are several."""
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None if logprobs is None else logprobs_json(logprobs),
        "finish_reason": finish_reason,
    }
    if token_ids is not None:
        choice["token_ids"] = token_ids
    if figures is not None:
        choice |= {"hippo": figures, "metrics": metrics}
    return choice


def completion_json(
    *,
    completion_id: str,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    usage: Usage,
    figures: dict[str, Any],
    metrics: dict[str, Any],
) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage.to_json(),
        "hippo": figures,
        "metrics": metrics,
    }


def logprobs_json(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A choice's ``logprobs``."""
    return {"content": list(entries), "refusal": None}


def _usage_so_far(usage: Usage | None) -> dict[str, Any]:
    return {} if usage is None else {"usage": usage.to_json()}


def _choice(
    index: int, delta: dict[str, Any], *, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
