"""Incremental conversion of token ids to text, and the search for stop strings in the text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

# A character has at most four bytes, so at most three bytes can wait for a missing one.
_MAX_INCOMPLETE = 3
# A model may emit invalid bytes without end; after this many ids they are decoded as U+FFFD.
_MAX_WINDOW = 64


class Detokenizer:
    """Decodes one completion incrementally; special tokens are left out.

    The concatenated pieces equal the text of all ids. A character whose bytes are split across
    tokens is returned with its last token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last window: decoders may treat a first id differently
        self._context_text = ""
        self._window: list[int] = []
        self._num_emitted = 0  # characters of the window's text that were returned

    def add_tokens(self, token_ids: Sequence[int]) -> str:
        """Appends ids and returns the text that later ids cannot change."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._window_text()
        settled = text
        if len(self._window) <= _MAX_WINDOW:
            for _ in range(_MAX_INCOMPLETE):
                settled = settled.removesuffix("\ufffd")
        piece = settled[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(settled))
        if len(settled) == len(text):
            # After invalid bytes, no context is kept: later ids must not change returned text.
            self._context = [] if text.endswith("\ufffd") else self._window
            self._context_text = self._decode(self._context)
            self._window, self._num_emitted = [], 0
        return piece

    def flush_text(self) -> str:
        """Returns the text that was held back, with U+FFFD for bytes that form no character."""
        piece = self._window_text()[self._num_emitted :] if self._window else ""
        self._context, self._context_text, self._window, self._num_emitted = [], "", [], 0
        return piece

    def _window_text(self) -> str:
        return self._decode(self._context + self._window)[len(self._context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


class StopStrings:
    """Cuts a text, given in pieces, before the stop string that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._num_passed = 0  # a match must end after this many characters of _held
        self.matched: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stops)

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
        num_held = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        self._num_passed = max(0, self._num_passed - (len(text) - num_held))
        return text[: len(text) - num_held]

    def flush_text(self) -> str:
        """Returns the text that was held back as a possible beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Returns the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
