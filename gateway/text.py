"""The text of one answer as its tokens settle: decoded, and cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from gateway.detokenizer import Detokenizer, StopStrings
from hippo.types import FinishReason, Verdict


class AnswerText:
    """Takes verdicts and gives text; stop strings count from token ``min_tokens`` on."""

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0  # of the answer; none behind a stop string
        self.finish_reason: FinishReason | None = None

    def add(self, verdict: Verdict) -> str:
        """The text that is certain now. Nothing may be added after a finish reason."""
        token_ids = verdict.token_ids
        if verdict.finish_reason is FinishReason.STOP:
            token_ids = token_ids[:-1]  # the end token itself is no text
        piece = self._decode(token_ids)
        if self._stops.matched is None:
            self.num_tokens += len(verdict.token_ids) - len(token_ids)
            if verdict.finish_reason is not None:
                piece += self._look(self._detokenizer.finish(), self.num_tokens)
                piece += "" if self._stops.matched is not None else self._stops.finish()
                self.finish_reason = verdict.finish_reason
        if self._stops.matched is not None:
            self.finish_reason = FinishReason.STOP
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not self._stops.is_active:
            self.num_tokens += len(token_ids)
            return self._detokenizer.add(token_ids)
        # One by one, so that the count of tokens does not depend on how they were verified.
        text = ""
        for token_id in token_ids:
            self.num_tokens += 1
            text += self._look(self._detokenizer.add((token_id,)), self.num_tokens)
            if self._stops.matched is not None:
                break
        return text

    def _look(self, piece: str, num_tokens: int) -> str:
        return self._stops.add(piece, can_match=num_tokens > self._min_tokens)
