"""A time limit that a process which is stopped for a while does not run into."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TICK_S = 0.1


@asynccontextmanager
async def patience(limit_s: float) -> AsyncIterator[None]:
    """As ``asyncio.timeout``, TimeoutError included, but of time in which this process runs.

    However late a tick comes, it counts as one: what a stop (``SIGSTOP``) or other processes take
    is not held against what is waited for.
    """
    loop = asyncio.get_running_loop()
    handle: asyncio.TimerHandle
    num_left = max(1, round(limit_s / _TICK_S))
    async with asyncio.timeout(None) as timeout:

        def tick() -> None:
            nonlocal num_left, handle
            num_left -= 1
            if num_left:
                handle = loop.call_later(_TICK_S, tick)
            else:
                timeout.reschedule(loop.time())

        handle = loop.call_later(_TICK_S, tick)
        try:
            yield
        finally:
            handle.cancel()
