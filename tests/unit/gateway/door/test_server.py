"""The gateway's socket."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gateway.app import create_app
from gateway.common.config import GatewaySettings
from gateway.server import _bind, warn_if_exposed


@pytest.mark.parametrize(
    ("address", "is_exposed"),
    [("127.0.0.1", False), ("127.0.0.2", False), ("::1", False), ("0.0.0.0", True), ("::", True)],
)
def test_a_gateway_that_others_reach_without_keys_says_so(
    address: str, is_exposed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_exposed(address, 8000)
    assert ("--api-keys-file" in caplog.text) == is_exposed


@pytest.mark.parametrize("text", ["", '[alice]\nkey = "0123456789abcdef"\n'])
async def test_an_empty_file_has_no_keys(text: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(text)
    settings = GatewaySettings(target=("127.0.0.1:1",), api_keys_file=str(keys))
    assert create_app(settings, asyncio.Event()).state.is_open == (not text)


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
