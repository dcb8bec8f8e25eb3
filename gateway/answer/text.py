"""The text of one answer, decoded verdict by verdict, without its thought and cut at the first stop
string, with the log-probabilities of its tokens in OpenAI's shape."""

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.pairs.token_bytes import TokenBytes
from hippo.errors import IncompatiblePairError
from hippo.types import FinishReason, TokenLogprobs, Verdict

# For a token that the model rules out, as in OpenAI and vLLM: JSON has no minus infinity.
LEAST_LOGPROB = -9999.0


class Detokenizer:
    """Decodes one completion incrementally; special tokens are left out.

    A character whose bytes are split across tokens is returned with its last token, and bytes that
    form no character are returned as U+FFFD.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.has_begun = False  # whether a token that is not special has come

    def add_token(self, token_id: int) -> str:
        """Appends an id and returns the text that later ids cannot change."""
        if token_id in self._tokens.special_ids:
            return ""
        data = self._tokens.of_token(token_id, is_first=not self.has_begun)
        self.has_begun = True
        return self._decoder.decode(data)

    def flush_text(self) -> str:
        """Returns U+FFFD if the bytes of the last character are not complete, and otherwise ""."""
        return self._decoder.decode(b"", final=True)


class CompletionReader:
    """Decodes one completion that may begin with a thought.

    The prompt has begun the thought, or its marker is the first token. It ends with the first end
    marker; both markers belong to it, without text. Any later marker is text as any other token.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._begin_id, self._end_id = tokens.thought_ids or (-1, -1)
        self._detokenizer = Detokenizer(tokens)
        self._is_first = True
        self.is_thinking = False  # set before the first token if the prompt has begun a thought

    @property
    def has_begun(self) -> bool:
        """Whether a token with text has come of the part, thought or content, that goes on."""
        return self._detokenizer.has_begun

    def add_token(self, token_id: int) -> tuple[str, bool]:
        """Appends an id; returns the text that later ids cannot change, and whether this token is
        the thought's."""
        is_first, self._is_first = self._is_first, False
        if is_first and token_id == self._begin_id:
            self.is_thinking = True
            return "", True
        if not (self.is_thinking and token_id == self._end_id):
            return self._detokenizer.add_token(token_id), self.is_thinking
        self.is_thinking = False
        rest, self._detokenizer = self.flush_text(), Detokenizer(self._tokens)
        return rest, True

    def flush_text(self) -> str:
        """As Detokenizer's."""
        return self._detokenizer.flush_text()


class StopStrings:
    """Cuts a text, given in pieces, before the stop string that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._num_passed = 0  # a match must end after this many characters of _held
        self.matched: str | None = None

    def add_piece(self, piece: str, *, can_match: bool = True) -> str:
        """Appends a piece and returns the text that is certainly not part of a stop string.

        Returns "" after a match. A match may begin, but not end, in a piece without ``can_match``.
        """
        if not self._stops:
            return piece
        if self.matched is not None:
            return ""
        text = self._held + piece
        if not can_match:
            self._num_passed = len(text)
        # The stop string that ends first counts, so that the result is independent of the pieces.
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, self._num_passed - len(stop) + 1))) >= 0
        ]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        num_out = len(text) - max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[num_out:]
        self._num_passed = max(0, self._num_passed - num_out)
        return text[:num_out]

    def flush_text(self) -> str:
        """Returns the text that was held back as a possible beginning of a stop string; nothing
        after a match."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Returns the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
        lengths = range(min(len(text), len(stop) - 1), 0, -1)
        return next((length for length in lengths if text.endswith(stop[:length])), 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer's text, with the log-probabilities of the tokens that begin in it; before
    the text comes a part of the thought."""

    text: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()  # in OpenAI's shape
    events: tuple[dict[str, Any], ...] = ()  # only with return_events
    thought: str = ""

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.events or self.thought)


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        thought="".join(piece.thought for piece in pieces),
    )


class AnswerText:
    """Converts verdicts to text; a stop string counts only if it ends after ``min_tokens`` tokens.

    With ``has_logprobs``, verdicts have log-probabilities, and each is returned with the text that
    its token begins in. End tokens, a thought's, and tokens after a stop string get none. A thought
    has no stop strings.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        stops: Sequence[str],
        min_tokens: int = 0,
        has_logprobs: bool = False,
    ) -> None:
        self.reader = CompletionReader(tokens)
        self._thought: list[str] = []  # that was not returned yet
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._tokens = tokens
        self._has_logprobs = has_logprobs
        # (offset in the text, entry) of the tokens whose entries were not returned yet.
        self._entries: deque[tuple[int, dict[str, Any]]] = deque()
        self._num_decoded = 0  # characters
        self._num_out = 0  # characters that were returned
        self._end: FinishReason | None = None  # the target's
        self.num_tokens = 0  # the answer's, without tokens after a stop string
        self.num_thought_tokens = 0  # of them

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer has ended; None before."""
        return self._end if self._stops.matched is None else FinishReason.STOP

    def add_verdict(self, verdict: Verdict) -> Piece:
        """Returns the new text that later verdicts cannot change.

        Must not be called after ``finish_reason`` was set. Raises IncompatiblePairError for a
        verdict without the requested log-probabilities.
        """
        if self._has_logprobs and len(verdict.logprobs) != len(verdict.token_ids):
            raise IncompatiblePairError(
                "the target service tells no log-probabilities; it is of an older release"
            )
        text = "".join(self._texts(verdict))
        self._num_out += len(text)
        thought, self._thought = "".join(self._thought), []
        return Piece(text, tuple(self._take_entries()), thought=thought)

    def _texts(self, verdict: Verdict) -> Iterator[str]:
        """Yields the text token by token, so that it does not depend on the number of tokens of a
        verdict; nothing behind a stop string, and at the end of the answer what was held back."""
        has_end_token = verdict.finish_reason is FinishReason.STOP
        for place, token_id in enumerate(verdict.token_ids):
            if self._stops.matched is not None:
                return
            self.num_tokens += 1
            if has_end_token and place + 1 == len(verdict.token_ids):
                break  # the end token has no text
            is_first = not self.reader.has_begun
            piece, is_thought = self.reader.add_token(token_id)
            if is_thought:
                self.num_thought_tokens += 1
                self._thought.append(piece)
                continue
            if self._has_logprobs:
                entry = self._entry(token_id, verdict.logprobs[place], is_first=is_first)
                self._entries.append((self._num_decoded, entry))
            self._num_decoded += len(piece)
            yield self._cut_at_stop(piece)
        if verdict.finish_reason is not None:
            rest = self.reader.flush_text()
            if self.reader.is_thinking:
                self._thought.append(rest)
            else:
                yield self._cut_at_stop(rest)
                yield self._stops.flush_text()
            self._end = verdict.finish_reason

    def _cut_at_stop(self, piece: str) -> str:
        return self._stops.add_piece(piece, can_match=self.num_tokens > self._min_tokens)

    def _entry(self, token_id: int, logprobs: TokenLogprobs, *, is_first: bool) -> dict[str, Any]:
        """Returns one item of ``choices[].logprobs.content``."""
        own, *top = (
            _described(self._tokens.of_token(each, is_first=is_first), logprob)
            for each, logprob in ((token_id, logprobs.logprob), *logprobs.top)
        )
        return {**own, "top_logprobs": top}

    def _take_entries(self) -> Iterator[dict[str, Any]]:
        """Takes the entries of tokens that begin in returned text; at the natural end, all."""
        is_whole = self._end is not None and self._stops.matched is None
        while self._entries and (is_whole or self._entries[0][0] < self._num_out):
            yield self._entries.popleft()[1]


def _described(data: bytes, logprob: float) -> dict[str, Any]:
    """Returns a token's ``token``, ``logprob`` and ``bytes``; ``token`` has U+FFFD for invalid
    UTF-8."""
    return {
        "token": data.decode(errors="replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(data),
    }
