"""A streamed chat completion, with the time at which each piece of it came."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hippo.errors import HippoError, UnavailableError

# Where text comes in a choice's delta; a reasoning model's first token is in the second or third.
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")

CountedBy = Literal["ids", "usage", "pieces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer; times are seconds of one monotonic clock, the client's, unless said otherwise."""

    text: str
    asked_s: float
    piece_s: tuple[float, ...]  # when each piece of text came; at least one
    token_ids: tuple[int, ...] = ()  # empty where the server does not tell them
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)  # empty where it is not told
    figures: Mapping[str, Any] = field(default_factory=dict)  # a hippo gateway's `hippo` object

    @property
    def counted_by(self) -> CountedBy:
        """What ``num_tokens`` rests on; pieces of text may hold several tokens."""
        if self.token_ids:
            return "ids"
        return "usage" if self._num_reported else "pieces"

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, the end token included where the server tells."""
        return len(self.token_ids) or self._num_reported or len(self.piece_s)

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that the server had cached, if it tells."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    @property
    def ended_s(self) -> float:
        """When its last piece came."""
        return self.piece_s[-1]

    @property
    def ttft_s(self) -> float:
        """Request sent to first piece of text."""
        return self.piece_s[0] - self.asked_s

    @property
    def end_to_end_s(self) -> float:
        """Request sent to last piece of text."""
        return self.ended_s - self.asked_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first: first piece to last, over the tokens between."""
        return (self.ended_s - self.piece_s[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times from one piece of text to the next: what a reader sees as stuttering."""
        return [after - before for before, after in itertools.pairwise(self.piece_s)]

    @property
    def decode_s(self) -> float:
        """First token to last, by a hippo gateway's clock; else first piece to last.

        The first piece reaches a client with a delay of its own, which would shorten the decoding
        by as much.
        """
        if self.figures:
            return float(self.figures["timings_ms"]["decode"]) / 1e3
        return self.ended_s - self.piece_s[0]

    @property
    def decode_s_per_token(self) -> float:
        """``decode_s`` over the tokens after the first."""
        return self.decode_s / max(self.num_tokens - 1, 1)

    @property
    def _num_reported(self) -> int:
        return int(self.usage.get("completion_tokens") or 0)


class AnswerReader:
    """Takes the bytes of an event stream as they come."""

    def __init__(self) -> None:
        self._rest = b""
        self._text: list[str] = []
        self._piece_s: list[float] = []
        self._token_ids: tuple[int, ...] = ()
        self._finish_reason = ""
        self._usage: Mapping[str, Any] = {}
        self._figures: Mapping[str, Any] = {}
        self._is_complete = False
        self._last_s = 0.0

    def feed(self, data: bytes, at_s: float) -> list[str]:
        """The pieces of text that ``data``, which came at ``at_s``, completes.

        Raises HippoError for an error event, with its message, and for events of another kind.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._last_s = at_s
        pieces: list[str] = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[len(b"data:") :].strip()
            if event == b"[DONE]":
                self._is_complete = True
                continue
            pieces += self._take(_parsed(event), at_s)
        self._text += pieces
        return pieces

    def answer(self, asked_s: float) -> Answer:
        """What came. Raises UnavailableError for a stream that broke off."""
        if not (self._is_complete or self._finish_reason):
            raise UnavailableError("the answer broke off before its end")
        return Answer(
            text="".join(self._text),
            asked_s=asked_s,
            piece_s=tuple(self._piece_s) or (self._last_s,),
            token_ids=self._token_ids,
            finish_reason=self._finish_reason,
            usage=self._usage,
            figures=self._figures,
        )

    def _take(self, chunk: Mapping[str, Any], at_s: float) -> list[str]:
        if chunk.get("error"):
            raise HippoError(error_message(chunk) or f"the stream ended in an error: {chunk}")
        pieces = []
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            for name in _TEXT_FIELDS:
                if piece := delta.get(name):
                    self._piece_s.append(at_s)
                    pieces.append(str(piece))
            # A gateway of ours tells all ids in the last chunk, vLLM each chunk's own.
            self._token_ids += tuple(choice.get("token_ids") or ())
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._usage = chunk.get("usage") or self._usage
        self._figures = chunk.get("hippo") or self._figures
        return pieces


def read_answer(parts: Sequence[tuple[float, bytes]], *, asked_s: float) -> Answer:
    """The answer that a whole stream holds, each part with the time at which it came.

    Raises HippoError for a stream that ends in an error or without an end.
    """
    reader = AnswerReader()
    for at_s, data in parts:
        reader.feed(data, at_s)
    return reader.answer(asked_s)


def error_message(document: object) -> str | None:
    """The message of an error answer in one of the forms that servers use, if it is one."""
    if not isinstance(document, Mapping):
        return None
    for name in ("error", "detail", "message"):
        found = document.get(name)
        if isinstance(found, Mapping):
            found = found.get("message")
        if found:
            return str(found)
    return None


def _parsed(event: bytes) -> Mapping[str, Any]:
    try:
        chunk = json.loads(event)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise HippoError(f"an event is not that of a chat completion: {event[:200]!r}")
    return chunk
