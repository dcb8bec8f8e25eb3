"""Things done at once: none goes on when another has failed; and log lines."""

import asyncio
import contextlib
import logging

import pytest

from hippo.base.logs import setup_logging
from hippo.base.tasks import gather_or_cancel, start_task
from hippo.errors import MediaError, UnavailableError
from tests.support.watching.collector import living, no_collector


class Sleepers:
    """Counts who was cancelled; a cancelled one takes a moment to end."""

    def __init__(self) -> None:
        self.num_ended = 0

    async def sleep(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.num_ended += 1


async def _fail() -> None:
    raise MediaError("no video")


async def test_the_first_error_is_raised_as_it_is_and_ends_the_others() -> None:
    sleepers = Sleepers()
    with pytest.raises(MediaError, match="no video"):
        await gather_or_cancel([sleepers.sleep(), _fail(), _fail(), sleepers.sleep()])
    assert sleepers.num_ended == 2


async def test_a_cancellation_ends_all() -> None:
    sleepers = Sleepers()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await gather_or_cancel([sleepers.sleep(), sleepers.sleep()])
    assert sleepers.num_ended == 2


async def test_what_the_caller_held_is_freed_with_the_error() -> None:
    async def fail() -> None:
        sleepers = Sleepers()
        await gather_or_cancel([sleepers.sleep(), _fail()])

    with no_collector():
        with contextlib.suppress(MediaError):
            await fail()
        await asyncio.sleep(0.01)  # the event loop lets go of it, too
        assert not living(Sleepers)


@pytest.mark.parametrize("style", ["text", "json"])
def test_what_a_client_sends_makes_no_line_of_its_own(
    style: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        setup_logging("gateway", style=style)
        sent = "/\n12:00 ok\r\x1b[2J\u2028\x9b1m\u202e"
        logging.getLogger("a").info("GET %s", sent, extra={"key": "a\nb"})
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert told.isascii()


async def test_an_error_of_several_tasks_ends_each_of_them() -> None:
    error = UnavailableError("the device has failed")

    async def ends_after(seconds: float) -> None:
        try:
            raise error
        finally:
            await asyncio.sleep(seconds)

    tasks = [start_task(ends_after(each / 100)) for each in range(4)]
    assert await asyncio.gather(*tasks, return_exceptions=True) == [error] * 4
