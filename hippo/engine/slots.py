"""Cache slots: handed out and taken back on the event loop, in order of arrival.

A free slot still holds the rows of its last sequence. A sequence that begins as that one did takes
the slot over with them; which free slot it takes is decided when its prompt is read:

    reserve() ── granted() ── the prompt is read ── take(rows) ── ... ── release(rows)
    a place      (or a wait   (meanwhile)           the slot that        what it holds now
                 in line)                           fits best
"""

from __future__ import annotations

import asyncio
from collections import deque

from hippo.errors import OverloadedError
from hippo.models.content import CachedRows, no_rows

# Below that share of what a slot holds, a common beginning (a system prompt) is not worth the rest.
_LEAST_SHARE = 0.25


class SlotPool:
    """``num_slots`` slots and a queue of at most ``max_waiting`` for them."""

    def __init__(self, num_slots: int, *, max_waiting: int) -> None:
        self.num_slots = num_slots
        self.max_waiting = max_waiting
        # What each free slot holds, the least recently used first.
        self._free = {index: no_rows() for index in range(num_slots)}
        self._num_granted = 0  # of the free ones, promised to reservations
        self._waiting: deque[Reservation] = deque()

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free) + self._num_granted

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def reserve(self) -> Reservation:
        """A slot, or a place in the queue; raises OverloadedError when both are taken."""
        reservation = Reservation(self)
        if self._num_granted < len(self._free):
            self._grant(reservation)
        elif len(self._waiting) < self.max_waiting:
            self._waiting.append(reservation)
        else:
            queue = f" and all {self.max_waiting} places in the queue" if self.max_waiting else ""
            raise OverloadedError(f"all {self.num_slots} slots{queue} are taken; try again later")
        return reservation

    def take(self, rows: CachedRows) -> tuple[int, CachedRows]:
        """For a granted reservation: the free slot with the longest beginning in common with
        ``rows``, else the least recently used one; and what it holds."""
        assert self._num_granted > 0
        self._num_granted -= 1
        best, best_length = next(iter(self._free)), 0
        for index, held in self._free.items():
            length = rows.common_length(held)
            if length > best_length and length >= _LEAST_SHARE * len(held):
                best, best_length = index, length
        return best, self._free.pop(best)

    def give_back(self, reservation: Reservation, held: CachedRows) -> None:
        """Frees what the reservation has, for the next in the queue; its slot holds ``held``."""
        if reservation.index is not None:
            self._free[reservation.index] = held
        elif reservation.is_granted:
            self._num_granted -= 1
        else:
            self._waiting.remove(reservation)
        if self._waiting and self._num_granted < len(self._free):
            self._grant(self._waiting.popleft())

    def _grant(self, reservation: Reservation) -> None:
        self._num_granted += 1
        reservation.grant()


class Reservation:
    """One sequence's claim to a slot; ``index`` is there once it is taken."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._is_ready = asyncio.Event()  # granted or released
        self.is_granted = False
        self.is_released = False
        self.index: int | None = None

    def grant(self) -> None:
        self.is_granted = True
        self._is_ready.set()

    async def wait(self) -> bool:
        """Waits for the grant; False if the reservation was released instead."""
        await self._is_ready.wait()
        return not self.is_released

    def take(self, rows: CachedRows) -> tuple[int, CachedRows]:
        """A slot for a sequence that begins with ``rows``, and what the slot holds."""
        self.index, held = self._pool.take(rows)
        return self.index, held

    def release(self, held: CachedRows | None = None) -> None:
        """Gives up the slot, which holds ``held`` now (None: nothing of use), or the place in the
        queue; only the first call counts."""
        if not self.is_released:
            self.is_released = True
            self._pool.give_back(self, no_rows() if held is None else held)
            self._is_ready.set()
