"""Shares the device's time between waiting sequences (in prefill) and running ones (in decode)."""

from collections.abc import Collection

_WEIGHT = 4.0  # device time of a waiting sequence relative to a running one
_MOST_FORWARDS = 2.0  # prefill time between two forwards: at most the time of this many forwards
_MOST_TOKENS = 4.0  # tokens per forward and sequence above which the limit does not rise
# An answer takes at most twice as long beside other clients: prefills take 2/3 of a forward between
# two, and the rows of those clients' answers may lengthen the forwards by a fifth.
_MOST_FORWARDS_OF_OTHERS = 2 / 3


class PrefillShare:
    """Says when the next piece of a prefill may run; only the device thread uses it.

    Each waiting sequence gets ``_WEIGHT`` times the device time of a running one: it holds a slot
    without yielding tokens, and each token costs less if more sequences share a forward. A running
    sequence is delayed by at most ``_MOST_FORWARDS`` of its own forwards, times the tokens below.

    With speculation a forward yields several tokens per sequence, and counts as that many forwards,
    at most ``_MOST_TOKENS``. Without this factor, the few running sequences would finish quickly
    while all others wait for their prefill.

    If the prefill delays sequences of other clients than its own, its limit is
    ``_MOST_FORWARDS_OF_OTHERS``, whatever a forward yields: a sequence that gets few tokens does
    not pay for others' many.

    Pieces are of any length, so a piece in progress may exceed its budget, on a CPU often by far.
    If it delays other clients, the excess is taken from the budgets between the next forwards. (If
    it delays only its own, that costs throughput: ``bench.load --clients 8 --systems
    target-only`` gave 173 and 204 tokens/s instead of 241 and 214, run in turns on two cores.) If
    no sequence runs, one piece runs at a time, and the inbox is handled after it.
    """

    def __init__(self) -> None:
        self._clients: Collection[str] = ()  # whose sequences were in the last forward
        self.forward_ns = 0  # duration of the last forward
        self._tokens_each = 1.0
        self._delays_others = False
        self.budget_ns = 0.0  # of the pieces between two forwards
        self._spent_ns = 0.0  # since the last forward, and what is owed from before
        self._has_run = False  # a piece, in this turn without a forward

    def allows(self, client: str, *, num_waiting: int) -> bool:
        """Whether a piece of this client's prefill, one of ``num_waiting``, may run before the next
        forward."""
        if not self._clients:
            return not self._has_run
        self._delays_others = any(other != client for other in self._clients)
        most, tokens_each = _MOST_FORWARDS, min(max(self._tokens_each, 1.0), _MOST_TOKENS)
        if self._delays_others:
            most, tokens_each = _MOST_FORWARDS_OF_OTHERS, 1.0
        num_forwards = min(_WEIGHT * num_waiting / len(self._clients), most) * tokens_each
        self.budget_ns = self.forward_ns * num_forwards
        return self._spent_ns < self.budget_ns

    def count_piece(self, duration_ns: int) -> None:
        self._has_run = True
        if self._clients:
            self._spent_ns += duration_ns

    def count_forward(self, forward_ns: int, clients: Collection[str], num_tokens: int) -> None:
        owed_ns = max(self._spent_ns - self.budget_ns, 0.0)
        self._spent_ns = owed_ns if self._delays_others else 0.0
        self._clients = clients
        self.forward_ns = forward_ns
        self._tokens_each = num_tokens / len(clients)

    def count_no_forward(self) -> None:
        """No sequence had a step in this turn."""
        self._clients = ()
        self._has_run = False
