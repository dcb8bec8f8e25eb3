"""How the device's time is shared between sequences that prefill and those that run."""

from __future__ import annotations

_WEIGHT = 4.0  # of a waiting sequence against a running one
_MOST_FORWARDS = 2.0  # time for prefills between two forwards, in forwards of one token each
_MOST_TOKENS = 4.0  # of a forward and sequence that count


def prefill_budget_ns(
    *, num_waiting: int, num_running: int, forward_ns: int, tokens_each: float = 1.0
) -> float:
    """How long pieces of prefills may run before the next forward, in nanoseconds.

    Each waiting sequence gets ``_WEIGHT`` times the device time of a running one: it holds a slot
    and gives nothing yet, and the more sequences share a forward, the cheaper each token is. A
    running sequence is never held up for longer than ``_MOST_FORWARDS`` of its own forwards (and
    the piece in progress; on a GPU the one behind it as well). ``num_running`` sequences shared the
    last forward, which took ``forward_ns``; without any there is nobody to hold up, and the next
    look at the inbox is due after one piece.

    A forward that gave each of them ``tokens_each`` tokens, as speculation does, counts as up to
    ``_MOST_TOKENS`` forwards: what a running sequence needs is tokens. By device time alone the
    few that run would be through their answers at once, and all others queue for their prefill.
    """
    if num_running == 0:
        return 0.0
    num_forwards = min(_WEIGHT * num_waiting / num_running, _MOST_FORWARDS)
    return forward_ns * num_forwards * min(max(tokens_each, 1.0), _MOST_TOKENS)
