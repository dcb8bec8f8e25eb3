"""Blocks over gRPC, as a draft that never stops has them sent to a target: from the draft's process
through one in the gateway's place to the target's (bench.calibrate)."""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from hippo.event_loop import run
from hippo.rpc.convert_stream import block_from_proto, block_to_proto
from hippo.types import Block
from hippo.v1.common_pb2 import Block as BlockMessage
from hippo.v1.target_pb2 import VerifyRequest

BLOCK_EVERY_S = 0.001  # as always optimistic's come on the bundled pair
_SEND, _RECEIVE = "/hippo.bench/Send", "/hippo.bench/Receive"


class _Blocks(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Sends blocks as the draft service does, or takes them off a stream as the target service."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, BlockMessage]:
        """Of the two methods."""
        if details.method == _SEND:
            return grpc.stream_stream_rpc_method_handler(
                self._send, BlockMessage.FromString, BlockMessage.SerializeToString
            )
        return grpc.stream_stream_rpc_method_handler(
            self._receive, VerifyRequest.FromString, BlockMessage.SerializeToString
        )

    async def _send(
        self, _requests: AsyncIterator[BlockMessage], _context: object
    ) -> AsyncIterator[BlockMessage]:
        due = time.monotonic()
        while True:
            yield block_to_proto(Block(0, 0, (7, 8)))
            due += BLOCK_EVERY_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _receive(
        self, requests: AsyncIterator[VerifyRequest], _context: object
    ) -> AsyncIterator[BlockMessage]:
        yield (await anext(requests)).verify
        async for _ in requests:
            pass


def serve_blocks() -> int:
    """Sends and takes blocks in a thread, on a port of the loopback device: its number."""
    ports: queue.Queue[int] = queue.Queue()

    async def serve() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Blocks(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ports.put(port)
        await server.wait_for_termination()

    threading.Thread(target=lambda: run(serve()), daemon=True).start()
    return ports.get()


async def relay_blocks() -> None:
    """Relays blocks as it is asked to on stdin, ``[from, to, seconds]`` a line (two ports), until
    that ends; says when the first one has arrived, and when the last one is sent."""
    _say()
    while line := await asyncio.to_thread(sys.stdin.readline):
        source, sink, seconds = json.loads(line)
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{source}") as from_draft,
            grpc.aio.insecure_channel(f"127.0.0.1:{sink}") as to_target,
        ):
            draft: Any = from_draft.stream_stream(
                _SEND, BlockMessage.SerializeToString, BlockMessage.FromString
            )
            target: Any = to_target.stream_stream(
                _RECEIVE, VerifyRequest.SerializeToString, BlockMessage.FromString
            )
            blocks, sent = draft(), target()  # what is sent is written
            await sent.write(VerifyRequest(verify=await blocks.read()))
            await sent.read()
            _say()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                block = block_from_proto(await blocks.read())
                await sent.write(VerifyRequest(verify=block_to_proto(block)))
            blocks.cancel()
            await sent.done_writing()
        _say()


def _say() -> None:
    """A line of JSON on stdout: so far all is done."""
    sys.stdout.write("null\n")
    sys.stdout.flush()
