"""A queue between a producer and the one task that writes a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class StreamQueue(Generic[ItemT]):
    """Items in order, for one consumer on the same event loop.

    Closing it lets the consumer take what is queued; then iterating raises the error it was closed
    with, once, or ends. (Kept for longer, it would keep the frames it went through, and with them
    the queue's owner, until the garbage collector came.)
    """

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self._error: Exception | None = None

    def put(self, item: ItemT) -> None:
        """Queues an item; ignored once closed."""
        if not self._is_closed:
            self._items.append(item)
            self._wake()

    def close(self, error: Exception | None = None) -> None:
        """Ends the queue; the first call counts."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._wake()

    def abort(self, error: Exception | None = None) -> None:
        """Ends the queue at once: what is queued is dropped, also after ``close``."""
        self._items.clear()
        self._is_closed = True
        self._error = error
        self._wake()

    def __aiter__(self) -> StreamQueue[ItemT]:
        return self

    async def __anext__(self) -> ItemT:
        while not self._items:
            if self._is_closed:
                raise self._take_error() or StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()

    def _take_error(self) -> Exception | None:
        error, self._error = self._error, None
        return error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
