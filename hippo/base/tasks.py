"""Concurrent tasks that end together when one fails; standard library only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Runs all coroutines concurrently and returns their results in order.

    Raises the first error, or a cancellation, after all other coroutines are cancelled and over.
    (``asyncio.gather`` lets them continue.)
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
        del tasks  # breaks a reference cycle: their errors refer to this frame


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until all are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
