"""A stream's end reaches whoever iterates over it, a slow service is waited for, and errors of
gRPC's own are passed on."""

import asyncio
import contextlib
import logging
import weakref
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from hippo.rpc.client import ClientStream, TargetClient
from hippo.rpc.server import RpcServer
from tests.support.models.toy_model import ToyModel
from tests.support.running.services import serving_target, target_only, toy_request
from tests.support.running.tcp import serving


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


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_a_service_that_is_slow_to_take_a_connection_is_waited_for() -> None:
    """As on a machine whose cores are all taken."""
    num_connections = 0

    async with serving_target(ToyModel()) as (_, behind):
        host, port = behind.address.split(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            await asyncio.sleep(0.5)
            to_service = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_copy(reader, to_service[1]), _copy(to_service[0], writer))

        async with serving(relay) as relayed:
            client = TargetClient(f"127.0.0.1:{relayed}")
            answer = await target_only(client, toy_request())
            assert answer.token_ids == (await target_only(behind, toy_request())).token_ids
            assert num_connections == 1
            await client.close()


@pytest.mark.parametrize(
    ("message", "num_errors"),
    [
        ('Failed "execute_batch": (<cygrpc.SendStatusFromServerOperation object at 0x7f>,)', 0),
        ("Failed grpc_call_start_batch: TOO_MANY_OPERATIONS", 1),
    ],
    ids=["a client that left before its status", "any other"],
)
async def test_an_error_of_grpcs_is_passed_on_unless_the_client_left(
    message: str, num_errors: int, caplog: pytest.LogCaptureFixture
) -> None:
    RpcServer("hippo.v1.Any")
    RpcServer("hippo.v1.Other")
    error = cygrpc.ExecuteBatchError(message)
    logging.getLogger("grpc._cython.cygrpc").error("in core by servicer method", exc_info=error)
    assert sum(record.levelno >= logging.ERROR for record in caplog.records) == num_errors
