"""A stream's end, however it comes, reaches whoever iterates over it."""

from __future__ import annotations

import asyncio
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

    _cython_call = None


async def test_an_error_of_the_transport_is_raised_where_the_stream_is_read() -> None:
    stream: ClientStream[Any, Any] = ClientStream(
        lambda metadata: BrokenCall(), "open", peer="x", attributes={"rpc.method": "x/Verify"}
    )
    async with asyncio.timeout(5), stream:
        with pytest.raises(grpc.aio.InternalError, match="the transport is gone"):
            await anext(stream)
