"""Which item a decoder takes next: its clients take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """An item that waits; ``seat`` is set when it is its turn."""

    is_expensive: bool
    seat: asyncio.Future[int]


class Turns:
    """Gives the items of many clients the seats 0 to ``num_seats`` - 1; belongs to one event loop.

    The last of several seats is kept for cheap items. An item that is not known to be expensive
    gets it when no other seat is free. If there are several other seats, a client that is at work
    leaves the last free seat to other clients, who may come. A seat that gets free goes to the
    client with the fewest items at work, and among equals to the client that has waited longest
    since it came or had a turn.
    """

    def __init__(self, num_seats: int) -> None:
        self._free = list(range(num_seats))
        self._reserved = num_seats - 1 if num_seats > 1 else None
        self._leaves_one = num_seats > 2
        self._at_work: Counter[str] = Counter()
        # By client; the first client's turn is next.
        self._waiting: OrderedDict[str, deque[_Ticket]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, client: str, *, is_expensive: bool = False) -> AsyncIterator[int]:
        """Waits for a seat, and yields its number. An item that turned out to be expensive comes
        back with ``is_expensive``, and is its client's next."""
        ticket = _Ticket(is_expensive, asyncio.get_running_loop().create_future())
        waiting = self._waiting.setdefault(client, deque())
        if is_expensive:
            waiting.appendleft(ticket)
            self._waiting.move_to_end(client, last=False)
        else:
            waiting.append(ticket)
        try:
            self._give_seats()
            yield await ticket.seat
        finally:
            self._leave(client, ticket)

    def is_reserved(self, seat: int) -> bool:
        """Whether the seat is kept for cheap items."""
        return seat == self._reserved

    def _leave(self, client: str, ticket: _Ticket) -> None:
        if ticket.seat.done() and not ticket.seat.cancelled():
            self._free.append(ticket.seat.result())
            self._at_work[client] -= 1
            self._at_work += Counter()  # drops clients without any
            self._give_seats()
        else:
            self._take_out(client, ticket)

    def _give_seats(self) -> None:
        for seat in sorted(self._free):
            if (found := self._next(seat)) is None:
                continue
            client, ticket = found
            self._free.remove(seat)
            self._at_work[client] += 1
            self._take_out(client, ticket)
            if client in self._waiting:
                self._waiting.move_to_end(client)
            ticket.seat.set_result(seat)

    def _next(self, seat: int) -> tuple[str, _Ticket] | None:
        """Returns the item for a free seat, and its client."""
        is_reserved = self.is_reserved(seat)
        num_general = sum(not self.is_reserved(each) for each in self._free)
        is_last = self._leaves_one and not is_reserved and num_general == 1
        found = [
            (client, ticket)
            for client, tickets in self._waiting.items()
            if not (is_last and self._at_work[client])
            for ticket in tickets
            if not ticket.seat.done() and not (is_reserved and ticket.is_expensive)
        ]
        return min(found, key=lambda one: self._at_work[one[0]], default=None)

    def _take_out(self, client: str, ticket: _Ticket) -> None:
        self._waiting[client].remove(ticket)
        if not self._waiting[client]:
            del self._waiting[client]
