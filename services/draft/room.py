"""Bounds the vision features that wait for their selections."""

from collections.abc import Callable, Hashable


class FeatureRoom:
    """Lets sequences run the vision tower ahead of their selections, in order of arrival, while the
    features that wait for a selection are of at most ``capacity`` tokens in total.

    The capacity is the length of the longest prompt, for whose features ModelShape.work_bytes
    leaves memory. A target has few prefills in progress (hippo.engine.jobs), so the room hardly
    delays a tower whose selection comes soon. Only the device thread uses this class.
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, int] = {}  # tokens, by owner
        self._waiting: dict[Hashable, tuple[int, Callable[[], None]]] = {}  # in order of arrival
        self._capacity = 0

    def enter(
        self, owner: Hashable, num_tokens: int, begin: Callable[[], None], *, capacity: int
    ) -> None:
        """Calls ``begin`` as soon as features of ``num_tokens`` tokens fit, possibly at once."""
        assert num_tokens <= capacity, "the features of one prompt fit"
        self._capacity = capacity
        self._waiting[owner] = num_tokens, begin
        self._admit()

    def skip_queue(self, owner: Hashable) -> bool:
        """Removes the owner from the queue, because its selection has come; returns whether the
        owner still waited. ``begin`` is then not called."""
        return self._waiting.pop(owner, None) is not None

    def leave(self, owner: Hashable) -> None:
        """Frees the place of an owner, if it has one, and lets others in."""
        self._waiting.pop(owner, None)
        self._held.pop(owner, None)
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            owner, (num_tokens, begin) = next(iter(self._waiting.items()))
            if sum(self._held.values()) + num_tokens > self._capacity:
                return
            del self._waiting[owner]
            self._held[owner] = num_tokens
            begin()
