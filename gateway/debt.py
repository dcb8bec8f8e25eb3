"""When a draft is given up, and what that is called."""

from __future__ import annotations

from hippo.errors import HippoError, IncompatiblePairError, OverloadedError, UnavailableError
from hippo.metrics.gateway import DraftLoss


class Debt:
    """Since when a draft has had more to say and was silent."""

    def __init__(self, limit_s: float) -> None:
        self._limit_ns = int(limit_s * 1e9)
        self._since_ns: int | None = None

    def note(self, owes_block: bool, now_ns: int, *, is_heard: bool = False) -> None:
        """After each event: whether the draft owes a block now; ``is_heard``: it just spoke."""
        if not owes_block:
            self._since_ns = None
        elif is_heard or self._since_ns is None:
            self._since_ns = now_ns

    def forgive(self) -> None:
        """The draft is gone."""
        self._since_ns = None

    def is_overdue(self, now_ns: int) -> bool:
        """Whether it has been silent for longer than the limit."""
        return self._since_ns is not None and now_ns - self._since_ns > self._limit_ns


def loss_of(error: HippoError) -> DraftLoss:
    """Why an answer goes on without its draft, by the error that ended its stream."""
    if isinstance(error, OverloadedError):
        return DraftLoss.OVERLOADED
    if isinstance(error, UnavailableError):
        return DraftLoss.UNAVAILABLE
    return DraftLoss.INCOMPATIBLE if isinstance(error, IncompatiblePairError) else DraftLoss.ERROR
