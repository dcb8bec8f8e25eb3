"""Cache slots: handed out and taken back on the event loop, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque

from hippo.errors import OverloadedError


class SlotPool:
    """``num_slots`` slots and a queue of at most ``max_waiting`` for them."""

    def __init__(self, num_slots: int, *, max_waiting: int) -> None:
        self.num_slots = num_slots
        self.max_waiting = max_waiting
        self._free = deque(range(num_slots))
        self._waiting: deque[Reservation] = deque()

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def reserve(self) -> Reservation:
        """A slot, or a place in the queue; raises OverloadedError when both are taken."""
        reservation = Reservation(self)
        if self._free:
            reservation.grant(self._free.popleft())
        elif len(self._waiting) < self.max_waiting:
            self._waiting.append(reservation)
        else:
            queue = f" and all {self.max_waiting} places in the queue" if self.max_waiting else ""
            raise OverloadedError(f"all {self.num_slots} slots{queue} are taken; try again later")
        return reservation

    def give_back(self, reservation: Reservation) -> None:
        """Frees what the reservation holds, for the next in the queue."""
        if reservation.index is None:
            self._waiting.remove(reservation)
        elif self._waiting:
            self._waiting.popleft().grant(reservation.index)
        else:
            self._free.append(reservation.index)


class Reservation:
    """One sequence's claim to a slot."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._granted = asyncio.Event()
        self._is_released = False
        self.index: int | None = None

    def grant(self, index: int) -> None:
        self.index = index
        self._granted.set()

    async def slot(self) -> int:
        """Waits for the slot's index."""
        await self._granted.wait()
        assert self.index is not None
        return self.index

    def release(self) -> None:
        """Gives up the slot or the place in the queue; only the first call counts."""
        if not self._is_released:
            self._is_released = True
            self._pool.give_back(self)
