"""The fuzzers' time limit."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench.fuzz.patience import patience


async def test_what_does_not_end_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        async with patience(0.2):
            await asyncio.Event().wait()


async def test_time_in_which_the_process_stands_still_does_not_count() -> None:
    async with patience(0.5):
        for _ in range(2):
            time.sleep(0.6)  # as a process that is stopped: timers are late, nothing has happened
            await asyncio.sleep(0)


async def test_an_error_inside_stays_what_it_is_and_nothing_is_given_up_later() -> None:
    with pytest.raises(ValueError, match="mine"):
        async with patience(0.1):
            raise ValueError("mine")
    async with patience(0.1):
        pass
    await asyncio.sleep(0.3)
