"""The text of one answer, decoded verdict by verdict and cut at the first stop string, with the
log-probabilities of its tokens in OpenAI's shape."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.answer.detokenizer import Detokenizer, StopStrings
from gateway.pairs.token_bytes import TokenBytes
from hippo.errors import IncompatiblePairError
from hippo.types import FinishReason, TokenLogprobs, Verdict

# For a token that the model rules out, as in OpenAI and vLLM: JSON has no minus infinity.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer's text, with the log-probabilities of the tokens that begin in it."""

    text: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()  # in OpenAI's shape
    events: tuple[dict[str, Any], ...] = ()  # only with return_events

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.events)


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Returns the concatenation of all pieces."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(entry for piece in pieces for entry in piece.logprobs),
    )


class AnswerText:
    """Converts verdicts to text; a stop string counts only if it ends after ``min_tokens`` tokens.

    With ``has_logprobs``, verdicts have log-probabilities, and each is returned with the text that
    its token begins in. End tokens and tokens after a stop string get none.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        stops: Sequence[str],
        min_tokens: int = 0,
        has_logprobs: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokens)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._tokens = tokens
        self._has_logprobs = has_logprobs
        # (offset in the text, entry) of the tokens whose entries were not returned yet.
        self._entries: deque[tuple[int, dict[str, Any]]] = deque()
        self._num_decoded = 0  # characters
        self._num_out = 0  # characters that were returned
        self.num_tokens = 0  # of the answer, without tokens after a stop string
        self.finish_reason: FinishReason | None = None

    def add_verdict(self, verdict: Verdict) -> Piece:
        """Returns the new text that later verdicts cannot change.

        Must not be called after ``finish_reason`` was set. Raises IncompatiblePairError for a
        verdict without the requested log-probabilities.
        """
        text = self._decode(verdict)
        if self._stops.matched is None and verdict.finish_reason is not None:
            self.num_tokens += verdict.finish_reason is FinishReason.STOP
            text += self._cut_at_stop(self._detokenizer.flush_text(), self.num_tokens)
            text += "" if self._stops.matched is not None else self._stops.flush_text()
            self.finish_reason = verdict.finish_reason
        if self._stops.matched is not None:
            self.finish_reason = FinishReason.STOP
        self._num_out += len(text)
        return Piece(text, self._take_entries())

    def _decode(self, verdict: Verdict) -> str:
        token_ids = verdict.token_ids
        if verdict.finish_reason is FinishReason.STOP:
            token_ids = token_ids[:-1]  # the end token has no text
        if self._has_logprobs and len(verdict.logprobs) != len(verdict.token_ids):
            raise IncompatiblePairError(
                "the target service tells no log-probabilities; it is of an older release"
            )
        if not self._stops.is_active and not self._has_logprobs:
            self.num_tokens += len(token_ids)
            return self._detokenizer.add_tokens(token_ids)
        # One by one, so that the result does not depend on the number of tokens of a verdict.
        text = ""
        for place, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if self._has_logprobs:
                self._entries.append(
                    (self._num_decoded, self._entry(token_id, verdict.logprobs[place]))
                )
            piece = self._detokenizer.add_tokens((token_id,))
            self._num_decoded += len(piece)
            text += self._cut_at_stop(piece, self.num_tokens)
            if self._stops.matched is not None:
                break
        return text

    def _entry(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """Returns one item of ``choices[].logprobs.content``."""
        is_first = not self._detokenizer.has_begun
        own, *top = (
            _described(self._tokens.of_token(each, is_first=is_first), logprob)
            for each, logprob in ((token_id, logprobs.logprob), *logprobs.top)
        )
        return {**own, "top_logprobs": top}

    def _take_entries(self) -> tuple[dict[str, Any], ...]:
        """Takes the entries of tokens that begin in returned text; at the natural end, all."""
        is_whole = self.finish_reason is not None and self._stops.matched is None
        taken = []
        while self._entries and (is_whole or self._entries[0][0] < self._num_out):
            taken.append(self._entries.popleft()[1])
        return tuple(taken)

    def _cut_at_stop(self, piece: str, num_tokens: int) -> str:
        return self._stops.add_piece(piece, can_match=num_tokens > self._min_tokens)


def _described(data: bytes, logprob: float) -> dict[str, Any]:
    """Returns a token's ``token``, ``logprob`` and ``bytes``; ``token`` has U+FFFD for invalid
    UTF-8."""
    return {
        "token": data.decode(errors="replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(data),
    }
