"""A streamed chat completion with the arrival time of each piece of text."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hippo.errors import HippoError, OverloadedError, UnavailableError

# By the error codes of a hippo gateway, those that another try may not meet.
_KINDS: Mapping[str | None, type[HippoError]] = {
    "overloaded": OverloadedError,
    "unavailable": UnavailableError,
}
_THOUGHT_FIELDS = ("reasoning", "reasoning_content")  # of a delta; some servers send both


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer; times are seconds on the client's monotonic clock."""

    text: str
    thought: str = ""  # what a model that thinks has thought before
    asked_s: float
    piece_s: tuple[float, ...]  # arrival of each piece of text; at least one
    token_ids: tuple[int, ...] = ()  # empty if the server does not send them
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)  # empty if the server does not send it
    figures: Mapping[str, Any] = field(default_factory=dict)  # a hippo gateway's `hippo` object
    metrics: Mapping[str, Any] = field(default_factory=dict)  # and its `metrics` object
    events: tuple[Mapping[str, Any], ...] = ()  # and its events, if they were asked for

    @property
    def counted_by(self) -> Literal["ids", "usage", "pieces"]:
        """How ``num_tokens`` was counted; a piece of text may hold several tokens."""
        if self.token_ids:
            return "ids"
        return "usage" if self.usage.get("completion_tokens") else "pieces"

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, with the end token if the server counts it."""
        num_reported = self.usage.get("completion_tokens")
        return len(self.token_ids) or int(num_reported or 0) or len(self.piece_s)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the server had cached; None if it does not report them."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    @property
    def ended_s(self) -> float:
        """Arrival time of the last piece."""
        return self.piece_s[-1]

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to the first piece of text."""
        return self.piece_s[0] - self.asked_s

    @property
    def end_to_end_s(self) -> float:
        """Seconds from sending the request to the last piece of text."""
        return self.ended_s - self.asked_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first: from first to last piece, over those tokens."""
        return (self.ended_s - self.piece_s[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive pieces of text, which a reader sees as stuttering."""
        return [after - before for before, after in itertools.pairwise(self.piece_s)]

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last.

        A hippo gateway reports them. Otherwise they run from the first piece to the last, so a
        delay of the first piece on its way shortens them.
        """
        if self.figures:
            return float(self.figures["timings_ms"]["decode"]) / 1e3
        return self.ended_s - self.piece_s[0]

    @property
    def decode_s_per_token(self) -> float:
        """``decode_s`` divided by the number of tokens after the first."""
        return self.decode_s / max(self.num_tokens - 1, 1)


class AnswerReader:
    """Parses the bytes of an event stream in arrival order."""

    def __init__(self) -> None:
        self._rest = b""
        self._text: list[str] = []
        self._thought: list[str] = []
        self._piece_s: list[float] = []
        self._token_ids: tuple[int, ...] = ()
        self._events: list[Mapping[str, Any]] = []
        self._told: dict[str, Any] = {}  # the other fields of the answer, as last told
        self._is_complete = False
        self._last_s = 0.0

    def feed_data(self, data: bytes, at_s: float) -> list[tuple[str, bool]]:
        """Returns the pieces of text that ``data``, received at ``at_s``, completes, and of each
        whether it is the thought's.

        Raises HippoError for an error event, with its message, and for an event without a JSON
        object.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._last_s = at_s
        pieces: list[tuple[str, bool]] = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[len(b"data:") :].strip()
            if event == b"[DONE]":
                self._is_complete = True
                continue
            try:
                chunk = json.loads(event)
            except ValueError:
                chunk = None
            if not isinstance(chunk, dict):
                shown = event[:200]
                raise HippoError(f"the server sent an event that is no chat completion: {shown!r}")
            pieces += self._take_chunk(chunk, at_s)
        for piece, is_thought in pieces:
            (self._thought if is_thought else self._text).append(piece)
        return pieces

    def answer(self, asked_s: float) -> Answer:
        """Returns the answer. Raises UnavailableError if the stream broke off."""
        if not (self._is_complete or "finish_reason" in self._told):
            raise UnavailableError("the answer broke off before its end")
        return Answer(
            text="".join(self._text),
            thought="".join(self._thought),
            asked_s=asked_s,
            piece_s=tuple(self._piece_s) or (self._last_s,),
            token_ids=self._token_ids,
            events=tuple(self._events),
            **self._told,
        )

    def _take_chunk(self, chunk: Mapping[str, Any], at_s: float) -> list[tuple[str, bool]]:
        if error := chunk.get("error"):
            code = error.get("code") if isinstance(error, Mapping) else None
            kind = _KINDS.get(code, HippoError)
            raise kind(error_message(chunk) or f"the stream ended in an error: {chunk}")
        pieces = []
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = next((found for name in _THOUGHT_FIELDS if (found := delta.get(name))), None)
            for piece, is_thought in ((thought, True), (delta.get("content"), False)):
                if piece:
                    self._piece_s.append(at_s)
                    pieces.append((str(piece), is_thought))
            # A hippo gateway sends all ids in the last chunk; vLLM sends each chunk's own ids.
            self._token_ids += tuple(choice.get("token_ids") or ())
            self._events += choice.get("events") or ()
            if reason := choice.get("finish_reason"):
                self._told["finish_reason"] = reason
        for name, key in (("usage", "usage"), ("figures", "hippo"), ("metrics", "metrics")):
            if told := chunk.get(key):
                self._told[name] = told
        return pieces


def read_answer(parts: Sequence[tuple[float, bytes]], *, asked_s: float) -> Answer:
    """Parses a whole stream, given as (arrival time, bytes) pairs, as ``AnswerReader`` does."""
    reader = AnswerReader()
    for at_s, data in parts:
        reader.feed_data(data, at_s)
    return reader.answer(asked_s)


def error_message(document: object) -> str | None:
    """Returns the message of an error body in one of the usual forms, or None."""
    if not isinstance(document, Mapping):
        return None
    for name in ("error", "detail", "message"):
        found = document.get(name)
        if isinstance(found, Mapping):
            found = found.get("message")
        if found:
            return str(found)
    return None
