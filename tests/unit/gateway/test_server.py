"""The gateway's socket."""

from __future__ import annotations

import asyncio
import socket

from gateway.server import _bind


async def test_pieces_of_a_stream_leave_at_once() -> None:
    """Not held back until the last one is acknowledged, which takes some clients 40 ms."""
    listener = _bind("127.0.0.1", 0)
    options: asyncio.Queue[int] = asyncio.Queue()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        options.put_nowait(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(connected, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await options.get() != 0
        writer.close()
        await writer.wait_closed()
