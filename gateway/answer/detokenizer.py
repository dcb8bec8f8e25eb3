"""Incremental conversion of token ids to text, and the search for stop strings in the text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from gateway.pairs.token_bytes import TokenBytes


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
