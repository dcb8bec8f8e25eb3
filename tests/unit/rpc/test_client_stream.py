"""A stream's end, however it comes, reaches whoever iterates over it."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import grpc
import pytest

from hippo.rpc.client import ClientStream


class BrokenCall:
    """A call whose transport fails in a way that is no status."""

    async def wait_for_connection(self) -> None:
        return None

    async def read(self) -> Any:
        raise grpc.aio.InternalError("the transport is gone")

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def cancel(self) -> None:
        return None

    _cython_call: Any = None


async def test_an_error_of_the_transport_is_raised_where_the_stream_is_read() -> None:
    stream: ClientStream[Any, Any] = ClientStream(
        lambda metadata: BrokenCall(), "open", peer="x", attributes={"rpc.method": "x/Verify"}
    )
    async with asyncio.timeout(30), stream:
        with pytest.raises(grpc.aio.InternalError, match="the transport is gone"):
            await anext(stream)


class Media:
    """Stands for a message with media, and for its bytes; is in ``living`` until it is deleted."""

    def __init__(self, living: weakref.WeakSet[Media]) -> None:
        self._living = living
        living.add(self)

    def SerializeToString(self) -> Media:
        return Media(self._living)


class SilentCall(BrokenCall):
    """A call that takes messages and answers nothing."""

    def __init__(self, living: weakref.WeakSet[Media]) -> None:
        self._living = living
        self._cython_call = self
        self._is_cancelled = asyncio.Event()
        self.was_sent = asyncio.Event()
        self.num_living = 0  # while the message was sent

    async def send_serialized_message(self, data: Media) -> None:
        self.num_living = len(self._living)
        self.was_sent.set()

    async def read(self) -> Any:
        await self._is_cancelled.wait()
        return grpc.aio.EOF  # type: ignore[attr-defined]

    def cancel(self) -> None:
        self._is_cancelled.set()


async def test_media_that_were_sent_are_not_kept_until_the_next_message() -> None:
    living: weakref.WeakSet[Media] = weakref.WeakSet()
    call = SilentCall(living)
    stream: ClientStream[Any, Any] = ClientStream(
        lambda metadata: call, Media(living), peer="x", attributes={"rpc.method": "x/Verify"}
    )
    async with asyncio.timeout(30), stream:
        await call.was_sent.wait()
        assert call.num_living == 1, "the message was kept beside its bytes"
        assert not living
