"""Tasks that end together when one fails, and errors that keep nothing alive; standard library
only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from traceback import clear_frames
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


@contextmanager
def clearing_frames() -> Iterator[None]:
    """Clears the local variables of the functions that an error leaves inside the block.

    Whoever keeps the error, as a task and gRPC do, would otherwise keep these variables until the
    next garbage collection: a request's media, or a sequence with its prompt's embeddings.
    """
    try:
        yield
    except BaseException as error:
        clear_frames(error.__traceback__)
        raise


def start_task(coroutine: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
    """Starts a task whose error keeps none of the coroutine's variables alive."""

    async def run() -> ResultT:
        with clearing_frames():
            return await coroutine

    task = asyncio.create_task(run())
    task.add_done_callback(lambda _: coroutine.close())  # it may not have begun
    return task
