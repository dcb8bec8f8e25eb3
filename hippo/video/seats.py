"""Places for worker processes, which are replaced if they die or must be killed; and whose item
comes to which place next: the clients take turns."""

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from hippo.base.worker_process import ForkedWorker, ForkServer, WorkerDiedError
from hippo.errors import UnavailableError

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_CLOSED = "the media decoder is closed"
_NOT_STARTED = "the media decoder does not start: is hippo-serve[engine] installed whole?"


class Seat:
    """Runs one function after another with a worker, which the first function starts. Belongs to
    one event loop; must be closed."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._worker: ForkedWorker | None = None
        self._working: asyncio.Future[Any] | None = None  # the thread that uses the worker
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def worker_pid(self) -> int | None:
        """None if no worker runs."""
        return None if self._worker is None else self._worker.pid

    async def start(self) -> None:
        """Starts the worker and waits until it is ready; raises UnavailableError if it fails."""
        if self._worker is None:
            try:
                ready = await self._with_worker(ForkedWorker.wait_ready, timeout_s=_START_TIMEOUT_S)
                _log_confinement(", ".join(ready["confined"]))
            except (WorkerDiedError, TimeoutError):
                raise UnavailableError(_NOT_STARTED) from None

    async def run(self, work: Callable[[ForkedWorker], ResultT], *, timeout_s: float) -> ResultT:
        """Runs ``work`` on a thread; kills the worker after a timeout, cancellation or crash.

        Raises what ``work`` raises, TimeoutError, and UnavailableError if the worker does not start
        or the seat is closed.
        """
        await self.start()
        return await self._with_worker(work, timeout_s=timeout_s)

    def close(self) -> None:
        """Kills the worker, also at work, which then raises UnavailableError."""
        self._is_closed = True
        self._retire()

    async def wait_ended(self) -> None:
        """Waits for the end of the workers that were killed."""
        await asyncio.gather(*self._ending)

    async def _with_worker(
        self, work: Callable[[ForkedWorker], ResultT], *, timeout_s: float
    ) -> ResultT:
        if self._is_closed:
            raise UnavailableError(_CLOSED)
        worker = self._worker = self._worker or self._server.fork()
        self._working = asyncio.ensure_future(asyncio.to_thread(work, worker))
        try:
            async with asyncio.timeout(timeout_s):
                result: ResultT = await asyncio.shield(self._working)
                return result
        except WorkerDiedError:
            self._retire()
            if self._is_closed:
                raise UnavailableError(_CLOSED) from None
            raise
        except (asyncio.CancelledError, TimeoutError):
            self._retire()
            raise
        finally:
            self._working = None  # its error refers to this frame

    def _retire(self) -> None:
        """Kills the worker, and cleans up when the thread that uses it has ended."""
        worker, self._worker, working = self._worker, None, self._working
        if worker is None:
            return
        worker.kill()

        async def end() -> None:
            if working is not None:
                await asyncio.gather(working, return_exceptions=True)
            await asyncio.to_thread(worker.clean_up)

        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


@cache
def _log_confinement(confined: str) -> None:
    _log.info("decoding with %s", confined or "no help of the kernel")


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
