"""A stream's end, however it comes, reaches whoever iterates over it."""

import asyncio
import weakref
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

from hippo.rpc.client import ClientStream


def stream_of(call: Any, opening: Any) -> ClientStream[Any, Any]:
    attributes = {"rpc.method": "x/Verify"}
    return ClientStream(lambda metadata: call, opening, peer="x", attributes=attributes)


async def test_an_error_of_the_transport_is_raised_where_the_stream_is_read() -> None:
    broken = AsyncMock(cancel=Mock())
    broken.read.side_effect = grpc.aio.InternalError("the transport is gone")
    async with asyncio.timeout(30), stream_of(broken, "open") as stream:
        with pytest.raises(grpc.aio.InternalError, match="the transport is gone"):
            await anext(stream)


class Media:
    """Stands for a message with media, and for its bytes; is in ``living`` until it is deleted."""

    def __init__(self, living: "weakref.WeakSet[Media]") -> None:
        self._living = living
        living.add(self)

    def SerializeToString(self) -> "Media":
        return Media(self._living)


async def test_media_that_were_sent_are_not_kept_until_the_next_message() -> None:
    living: weakref.WeakSet[Media] = weakref.WeakSet()
    was_sent, is_cancelled = asyncio.Event(), asyncio.Event()
    nums_living = []  # while the message was sent

    async def send(data: Media) -> None:
        nums_living.append(len(living))
        was_sent.set()

    async def read() -> Any:
        await is_cancelled.wait()
        return grpc.aio.EOF  # type: ignore[attr-defined]

    silent = AsyncMock(read=read, cancel=is_cancelled.set)
    silent._cython_call.send_serialized_message = send
    async with asyncio.timeout(30), stream_of(silent, Media(living)):
        await was_sent.wait()
        assert nums_living == [1], "the message was kept beside its bytes"
        assert not living
