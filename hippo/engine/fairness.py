"""Shares the device's time between waiting sequences (in prefill) and running ones (in decode)."""

from __future__ import annotations

_WEIGHT = 4.0  # device time of a waiting sequence relative to a running one
_MOST_FORWARDS = 2.0  # prefill time between two forwards: at most the time of this many forwards
_MOST_TOKENS = 4.0  # tokens per forward and sequence above which the limit does not rise


def prefill_budget_ns(
    *, num_waiting: int, num_running: int, forward_ns: int, tokens_each: float = 1.0
) -> float:
    """Returns how long pieces of prefills may run before the next forward, in nanoseconds.

    Each waiting sequence gets ``_WEIGHT`` times the device time of a running one: it holds a slot
    without yielding tokens, and each token costs less if more sequences share a forward. A running
    sequence is delayed by at most ``_MOST_FORWARDS`` of its own forwards (times the tokens below)
    and the piece in progress (on a GPU also the next piece). ``num_running`` sequences shared the
    last forward, which took ``forward_ns``. If no sequence runs, the result is 0: the inbox is
    handled after one piece.

    With speculation a forward yields ``tokens_each`` tokens per sequence, and counts as that many
    forwards, at most ``_MOST_TOKENS``. Without this factor, the few running sequences would finish
    quickly while all others wait for their prefill.
    """
    if num_running == 0:
        return 0.0
    num_forwards = min(_WEIGHT * num_waiting / num_running, _MOST_FORWARDS)
    return forward_ns * num_forwards * min(max(tokens_each, 1.0), _MOST_TOKENS)
