"""Several tasks at once that end together when one fails; standard library only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Runs all at once; the results, in order.

    The first error is raised as it is, and so is a cancellation: by then all the others are
    cancelled and over, where ``asyncio.gather`` lets them go on.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
        del tasks  # their errors hold this frame


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels them, and waits until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
