"""Slots of the KV cache, assigned to sequences on the event loop.

A slot that gets free goes to the client with the fewest slots, and of these to the first that came.

A free slot still holds the rows of its last sequence, and a sequence with the same first rows can
reuse them. Therefore a sequence chooses its slot only when its prompt is read:

    reserve_slot() ── wait_near() ── (prompt read) ── wait_granted() ── take_slot(rows) ── ...
    a claim           in the queue                    next in line      the best free slot

Of the sequences in the queue only the first few read their prompts; the others hold no decoded
media, but the bytes of files that the service does not open by path.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from hippo.base.tracing import span
from hippo.errors import OverloadedError
from hippo.models.interface.content import CachedRows, no_rows

# Reusing a smaller share of a slot's rows (a system prompt) is not worth losing the rest.
_LEAST_SHARE = 0.25


class SlotPool:
    """``num_slots`` slots, and a queue of at most ``max_waiting`` reservations of together at most
    ``max_waiting_bytes`` bytes of media, of which the first ``num_near`` are near."""

    def __init__(
        self,
        num_slots: int,
        *,
        max_waiting: int,
        max_waiting_bytes: int = 1 << 30,
        num_near: int = 1,
    ) -> None:
        self.num_slots = num_slots
        self.max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._num_near = num_near
        # The rows that each free slot holds, least recently used slot first.
        self._free = {index: no_rows() for index in range(num_slots)}
        self._num_granted = 0  # granted reservations that have not taken their slot yet
        self._waiting: list[Reservation] = []  # in order of arrival
        self._in_use: Counter[str] = Counter()  # granted reservations by client

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free) + self._num_granted

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def reserve_slot(
        self, num_bytes: int = 0, *, client: str = "", may_wait: bool = True
    ) -> "Reservation":
        """Reserves a slot, or, if the caller ``may_wait``, a place in the queue for a request of
        ``client`` with ``num_bytes`` bytes of media; raises OverloadedError if neither is free."""
        reservation = Reservation(self, num_bytes, client)
        if self._num_granted < len(self._free):
            self._grant(reservation)
        elif may_wait and self._has_place(num_bytes):
            self._waiting.append(reservation)
            self._tell_near()
        else:
            queue = (
                f", and {self.num_waiting} of {self.max_waiting} places in the queue (for at most "
                f"{self._max_waiting_bytes >> 20:,} MiB of media)"
            )
            full = f"all {self.num_slots} slots are taken{queue if self.max_waiting else ''}"
            raise OverloadedError(f"{full}; try again later")
        return reservation

    def _has_place(self, num_bytes: int) -> bool:
        num_bytes += sum(each.num_bytes for each in self._waiting)
        return len(self._waiting) < self.max_waiting and num_bytes <= self._max_waiting_bytes

    def take_slot(self, rows: CachedRows) -> tuple[int, CachedRows]:
        """Returns the free slot with the longest common prefix with ``rows`` (at least
        ``_LEAST_SHARE`` of its rows), otherwise the least recently used one, and the rows that it
        holds; only for a granted reservation."""
        assert self._num_granted > 0
        self._num_granted -= 1
        best, best_length = next(iter(self._free)), 0
        for index, held in self._free.items():
            length = rows.common_length(held)
            if length > best_length and length >= _LEAST_SHARE * len(held):
                best, best_length = index, length
        return best, self._free.pop(best)

    def end_reservation(self, reservation: "Reservation", held: CachedRows) -> None:
        """Frees the slot or place of a reservation; ``held`` are the rows in the slot."""
        if reservation.is_granted:
            self._in_use[reservation.client] -= 1
            self._in_use += Counter()  # drops clients without any
        if reservation.index is not None:
            self._free[reservation.index] = held
        elif reservation.is_granted:
            self._num_granted -= 1
        else:
            self._waiting.remove(reservation)
        if self._waiting and self._num_granted < len(self._free):
            first = next(self._in_line())
            self._waiting.remove(first)
            self._grant(first)
        self._tell_near()

    def _in_line(self) -> "Iterator[Reservation]":
        """Yields the waiting reservations in the order in which they would get a slot now."""
        waiting, in_use = list(self._waiting), self._in_use.copy()
        while waiting:
            first = min(waiting, key=lambda each: in_use[each.client])
            waiting.remove(first)
            in_use[first.client] += 1
            yield first

    def _grant(self, reservation: "Reservation") -> None:
        self._num_granted += 1
        self._in_use[reservation.client] += 1
        reservation.grant()

    def _tell_near(self) -> None:
        for reservation in islice(self._in_line(), self._num_near):
            reservation.is_near.set()


class Reservation:
    """One sequence's claim to a slot; ``index`` is None until the slot is taken. ``num_bytes`` are
    of media that it holds in the queue."""

    def __init__(self, pool: SlotPool, num_bytes: int, client: str) -> None:
        self._pool = pool
        self.num_bytes = num_bytes
        self.client = client
        self.is_near = asyncio.Event()  # among the first in the queue, granted or released
        self._is_ready = asyncio.Event()  # granted or released
        self.is_granted = False
        self.is_released = False
        self.index: int | None = None

    def grant(self) -> None:
        self.is_granted = True
        self.is_near.set()
        self._is_ready.set()

    async def wait_near(self) -> bool:
        """Waits until the prompt should be read, because a slot is granted or soon will be; returns
        False if the reservation was released instead."""
        return await self._wait(self.is_near)

    async def wait_granted(self) -> bool:
        """Waits for the grant; returns False if the reservation was released instead."""
        return await self._wait(self._is_ready)

    async def _wait(self, event: asyncio.Event) -> bool:
        if not event.is_set():
            with span("queue"):
                await event.wait()
        return not self.is_released

    def take_slot(self, rows: CachedRows) -> tuple[int, CachedRows]:
        self.index, held = self._pool.take_slot(rows)
        return self.index, held

    def release(self, held: CachedRows | None = None) -> None:
        """Frees the slot, which now holds the rows ``held`` (None: no valid ones), or the place in
        the queue; later calls have no effect."""
        if not self.is_released:
            self.is_released = True
            self._pool.end_reservation(self, no_rows() if held is None else held)
            self.is_near.set()
            self._is_ready.set()
