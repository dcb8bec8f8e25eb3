"""JSON of chat completions: whole answers, and the server-sent events of a stream."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from gateway.answer.choices import Choices
from gateway.answer.completion import Completion
from gateway.answer.report import client_metrics
from gateway.answer.text import Piece, join_pieces
from gateway.api.schemas import ChatCompletionRequest, StreamOptions

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"  # a comment, which clients skip
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects the stream defeats it
)

_to_json = json.JSONEncoder(separators=(",", ":")).encode


class AnswerWriter:
    """Writes the answer to a request, with what the request asks for beside the text.

    ``head`` holds the fields that all chunks of a stream have in common.
    """

    def __init__(self, body: ChatCompletionRequest) -> None:
        self._body = body
        self._options = body.stream_options or StreamOptions()
        self.head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }

    async def whole(self, choices: Choices) -> dict[str, Any]:
        """Returns the answer when all choices are over."""
        pieces: list[list[Piece]] = [[] for _ in choices.completions]
        async for index, piece in choices.pieces():
            if piece is not None:
                pieces[index].append(piece)
        made = []
        for index, (completion, parts) in enumerate(zip(choices.completions, pieces, strict=True)):
            answer = join_pieces(parts)
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            message |= self._thought(answer)
            choice = self._choice(index, {"message": message}, answer, completion)
            made.append(choice | (completion.reports if len(pieces) > 1 else {}))
        return {
            **self.head,
            "object": "chat.completion",
            "choices": made,
            "usage": choices.usage,
            **choices.completions[0].reports,
        }

    async def chunks(self, choices: Choices, idle_s: float | None) -> AsyncIterator[bytes]:
        """Yields the events of a stream up to the end of the last choice, and a comment after each
        ``idle_s`` of silence."""

        def event_of(choice: dict[str, Any], reports: dict[str, Any]) -> bytes:
            usage = choices.usage if self._options.continuous_usage_stats else None
            return self._event({"choices": [choice], **reports}, usage)

        for index in range(len(choices.completions)):
            delta = {"role": "assistant", "content": ""}
            yield event_of(self._choice(index, {"delta": delta}, Piece()), {})
        async for index, piece in choices.pieces(idle_s):
            if piece is None:
                completion = choices.completions[index]
                choice = self._choice(index, {"delta": {}}, Piece(), completion)
                yield event_of(choice, completion.reports)
            elif (delta := self._delta(piece)) or piece.events:
                choice = self._choice(index, {"delta": delta}, piece)
                if piece.events:
                    choice["events"] = list(piece.events)
                yield event_of(choice, {})
            else:
                yield KEEPALIVE

    def end_stream(self, choices: Choices) -> bytes:
        """Returns the end of the stream, after a usage chunk if the request asks for it."""
        if not self._options.include_usage:
            return DONE
        metrics = client_metrics(choices.records[0])
        return self._event({"choices": [], "metrics": metrics}, choices.usage) + DONE

    def _event(self, fields: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
        """With ``include_usage`` each chunk has a ``usage``, null where none is given."""
        with_usage = {"usage": usage} if self._options.include_usage else {}
        return event({**self.head, "object": "chat.completion.chunk", **fields, **with_usage})

    def _delta(self, piece: Piece) -> dict[str, Any]:
        content = {"content": piece.text} if piece.text or piece.logprobs else {}
        return self._thought(piece) | content

    def _thought(self, piece: Piece) -> dict[str, Any]:
        """Returns the fields of a thought, by vLLM's name and by its earlier one, which others
        have."""
        if not piece.thought or self._body.include_reasoning is False:
            return {}
        return {"reasoning": piece.thought, "reasoning_content": piece.thought}

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        piece: Piece,
        ended: Completion | None = None,
    ) -> dict[str, Any]:
        """Returns one item of ``choices``; ``content`` holds its ``message`` or ``delta``."""
        has_logprobs = bool(piece.logprobs or (self._body.logprobs and "message" in content))
        choice: dict[str, Any] = {
            "index": index,
            **content,
            "logprobs": (
                {"content": list(piece.logprobs), "refusal": None} if has_logprobs else None
            ),
            "finish_reason": None if ended is None else ended.finish_reason,
        }
        if ended is not None and self._body.return_token_ids:
            choice["token_ids"] = ended.token_ids
        return choice


def event(data: dict[str, Any]) -> bytes:
    """Returns one server-sent event."""
    return f"data: {_to_json(data)}\n\n".encode()
