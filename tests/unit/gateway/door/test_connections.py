"""Connections to the gateway's socket: how many, and how long a head may take."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn
from fastapi.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from gateway.app import create_app
from gateway.common.config import GatewaySettings
from gateway.door.connections import ConnectionLimit, bounded_protocol, most_connections
from gateway.server import _bind, warn_if_exposed

HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("here")(scope, receive, send)


@contextlib.asynccontextmanager
async def _serving(most: int, *, head_s: float = 60.0) -> AsyncIterator[int]:
    config = uvicorn.Config(
        _app,
        port=0,
        http=bounded_protocol(ConnectionLimit(most), head_s=head_s),
        lifespan="off",
        log_level="critical",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await asyncio.wait_for(task, 30)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(HEAD)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    return head if b"200 OK" not in head else await reader.readexactly(4)


async def test_a_connection_above_the_limit_is_told_to_come_back() -> None:
    async with _serving(4) as port, contextlib.AsyncExitStack() as stack:
        held = []
        for _ in range(2):  # half of the connections are one address's
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            held.append((reader, writer))
            assert await _ask(reader, writer) == b"here"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        told = await asyncio.wait_for(reader.read(), 30)
        assert told.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in told
        held[0][1].close()
        async with asyncio.timeout(30):
            while True:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    if await _ask(reader, writer) == b"here":
                        break


@pytest.mark.parametrize("has_asked", [False, True])
@pytest.mark.parametrize("sent", [b"", HEAD[:9]])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes, has_asked: bool) -> None:
    async with _serving(10, head_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if has_asked:
            assert await _ask(reader, writer) == b"here"
        writer.write(sent)
        told = await asyncio.wait_for(reader.read(), 30)
        # After an answer a connection may be idle for uvicorn's own time, and ends without a word.
        assert told.startswith(b"HTTP/1.1 408") or (has_asked and not sent and not told)
        writer.close()


async def test_a_request_that_is_being_answered_takes_its_time() -> None:
    async with _serving(10, head_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            assert await _ask(reader, writer) == b"here"
            await asyncio.sleep(0.15)
        writer.close()


def test_each_connection_may_have_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = [(100, 300)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    assert most_connections(100) == 100
    assert limits[-1] == (300, 300)
    assert most_connections(1000) == 150


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
