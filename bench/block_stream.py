"""Blocks over gRPC from one process to another, as a draft that never stops sends them to a target
(bench.calibrate)."""

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
from hippo.v1.common_pb2 import Block
from hippo.v1.target_pb2 import VerifyRequest

BLOCK_EVERY_S = 0.001  # as always optimistic's come on the bundled pair
_METHOD = "/hippo.bench/Receive"


class _Receiver(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Takes blocks off a stream as the target service does, and answers the first."""

    def service(
        self, _details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[VerifyRequest, VerifyRequest]:
        """Whatever is called."""
        return grpc.stream_stream_rpc_method_handler(
            self._receive, VerifyRequest.FromString, VerifyRequest.SerializeToString
        )

    async def _receive(
        self, requests: AsyncIterator[VerifyRequest], _context: object
    ) -> AsyncIterator[VerifyRequest]:
        yield await anext(requests)
        async for _ in requests:
            pass


def receive_blocks() -> int:
    """Takes blocks in a thread, on a port of the loopback device: its number."""
    ports: queue.Queue[int] = queue.Queue()

    async def serve() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Receiver(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ports.put(port)
        await server.wait_for_termination()

    threading.Thread(target=lambda: run(serve()), daemon=True).start()
    return ports.get()


async def send_blocks() -> None:
    """Sends blocks as it is asked to on stdin, ``[port, seconds]`` a line, until that ends."""
    _say()
    block = VerifyRequest(verify=Block(token_ids=[7, 8]))
    while line := await asyncio.to_thread(sys.stdin.readline):
        port, seconds = json.loads(line)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream: Any = channel.stream_stream(
                _METHOD, VerifyRequest.SerializeToString, VerifyRequest.FromString
            )
            call = stream()  # what is sent is written
            await call.write(block)
            await call.read()
            _say()
            due = time.monotonic()
            end = due + seconds
            while due < end:
                await call.write(block)
                due += BLOCK_EVERY_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await call.done_writing()
        _say()


def _say() -> None:
    """A line of JSON on stdout: so far all is done."""
    sys.stdout.write("null\n")
    sys.stdout.flush()
