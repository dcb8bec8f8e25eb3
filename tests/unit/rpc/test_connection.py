"""How long a client waits for a service that is there."""

import asyncio
import contextlib

from hippo.rpc.client import TargetClient
from tests.support.models.toy_model import ToyModel
from tests.support.running.services import serving_target, target_only, toy_request
from tests.support.running.tcp import serving


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
