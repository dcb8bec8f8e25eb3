"""Token ids to text, piece by piece, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

# A character takes at most four bytes: up to three of them may still wait for the last one.
_MAX_INCOMPLETE = 3
# A model may emit broken bytes for ever; past this many ids they are given out as they are.
_MAX_WINDOW = 64


class Detokenizer:
    """Decodes one completion incrementally; special tokens are left out.

    The pieces, joined, are the text of the whole run of ids. A character whose bytes are split
    across tokens comes out with its last token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last window: some decoders treat a first id differently
        self._context_text = ""
        self._window: list[int] = []
        self._num_emitted = 0  # characters of the window's text that are out

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes further ids and returns the text that is now certain."""
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
            # Behind broken bytes, decoding starts afresh: later ids must not change what is out.
            self._context = [] if text.endswith("\ufffd") else self._window
            self._context_text = self._decode(self._context)
            self._window, self._num_emitted = [], 0
        return piece

    def finish(self) -> str:
        """Returns what was held back; bytes that form no character become U+FFFD."""
        piece = self._window_text()[self._num_emitted :] if self._window else ""
        self._context, self._context_text, self._window, self._num_emitted = [], "", [], 0
        return piece

    def _window_text(self) -> str:
        return self._decode(self._context + self._window)[len(self._context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


class StopStrings:
    """Cuts a text, given in pieces, before that of several strings which is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._num_passed = 0  # characters of it up to which no match may end
        self.matched: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    def add(self, piece: str, *, can_match: bool = True) -> str:
        """Takes a piece and returns what can be given out; after a match, nothing more.

        No stop string is complete in a piece that cannot match; one may begin there.
        """
        if not self._stops:
            return piece
        if self.matched is not None:
            return ""
        text = self._held + piece
        if not can_match:
            self._num_passed = len(text)
        # The first one to be complete counts, so that the borders of the pieces do not.
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

    def finish(self) -> str:
        """Returns what was held back as the possible beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that begins ``stop``."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
