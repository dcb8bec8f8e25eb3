"""Detects a stalled draft, and names the cause of a lost draft."""

from __future__ import annotations

from hippo.errors import (
    ContextLengthError,
    HippoError,
    IncompatiblePairError,
    OverloadedError,
    UnavailableError,
)
from hippo.metrics.gateway import DraftLoss


class Debt:
    """Measures how long a draft that owes a block has been silent."""

    def __init__(self, limit_s: float) -> None:
        self._limit_ns = int(limit_s * 1e9)
        self._since_ns: int | None = None

    def note_owed_block(self, owes_block: bool, now_ns: int, *, is_heard: bool = False) -> None:
        """Updates the state after an event; ``is_heard``: the event was a message of the draft."""
        if not owes_block:
            self._since_ns = None
        elif is_heard or self._since_ns is None:
            self._since_ns = now_ns

    def clear(self) -> None:
        """Resets the measurement, because the draft is gone."""
        self._since_ns = None

    def is_overdue(self, now_ns: int) -> bool:
        """Whether a draft that owes a block has been silent for longer than the limit."""
        return self._since_ns is not None and now_ns - self._since_ns > self._limit_ns


def loss_of(error: HippoError) -> DraftLoss:
    """Returns why an answer lost its draft, by the error that ended the draft's stream."""
    if isinstance(error, OverloadedError):
        return DraftLoss.OVERLOADED
    if isinstance(error, UnavailableError):
        return DraftLoss.UNAVAILABLE
    if isinstance(error, ContextLengthError):
        return DraftLoss.NO_ROOM
    return DraftLoss.INCOMPATIBLE if isinstance(error, IncompatiblePairError) else DraftLoss.ERROR
