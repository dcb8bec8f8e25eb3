"""What the middleware refuses before a route sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.app import create_app
from gateway.common.budget import ByteBudget
from gateway.common.config import GatewaySettings
from gateway.common.metrics import GatewayMetrics
from gateway.door.middleware import RequestMiddleware
from tests.support.running.gateways import client_of


def _limited(app: ASGIApp, *, max_body_bytes: int = 1 << 30) -> RequestMiddleware:
    return RequestMiddleware(
        app,
        max_body_bytes=max_body_bytes,
        max_file_bytes=100,
        budget=ByteBudget(1 << 30),
        metrics=GatewayMetrics(max_draft_tokens=1),
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/videos", "the video is larger than 100 bytes, this server's limit (--max-media-"),
        ("/v1/models", "the request body is larger than 10 bytes, this server's limit (--max-body"),
    ],
)
async def test_what_is_too_large_is_told_the_operators_limit(path: str, words: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    async with client_of(_limited(app, max_body_bytes=10)) as http:
        answer = await http.post(path, content=bytes(1 << 17))
    assert answer.status_code == 413
    assert answer.json()["error"]["message"].startswith(words)


FORM_TYPE = "multipart/form-data; boundary=x"
FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.mp4"\r\n\r\n' + bytes(600)


@pytest.mark.parametrize(
    ("path", "content_type", "piece"),
    [
        ("/v1/chat/completions", "application/json", b'{"model": "hippo", '),
        ("/v1/videos", FORM_TYPE, FORM),
        ("/v1/videos", FORM_TYPE, FORM[:20]),
    ],
    ids=["chat", "file", "head of a file"],
)
async def test_a_body_that_stops_coming_is_given_up_and_leaves_nothing(
    path: str, content_type: str, piece: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.door.middleware._LONGEST_PAUSE_S", 0.05)
    settings = GatewaySettings(
        target=("127.0.0.1:1",), upload_dir=str(tmp_path), max_upload_bytes=1000
    )
    app = create_app(settings, asyncio.Event())

    async def stalled() -> AsyncIterator[bytes]:
        yield piece
        await asyncio.Event().wait()

    async with client_of(app) as http:
        answer = await http.post(path, content=stalled(), headers={"content-type": content_type})
        assert answer.status_code == 408
        assert answer.headers["connection"] == "close"
        assert answer.json()["error"]["code"] == "body_stalled"
        assert not [each for each in tmp_path.rglob("*") if each.is_file()]
        # There is room for one such file, so the bytes of the first are not counted any more.
        files = {"file": ("a.mp4", bytes(600), "video/mp4")}
        assert (await http.post("/v1/videos", files=files)).status_code == 200


async def test_a_client_that_has_sent_its_request_may_wait_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An application awaits the next message to know when the client leaves."""
    monkeypatch.setattr("gateway.door.middleware._LONGEST_PAUSE_S", 0.01)
    messages: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.request", "body": b"}", "more_body": False},
    ]

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError

    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([(await receive())["type"] for _ in range(3)])

    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/models", "headers": []}
    await _limited(app, max_body_bytes=10)(scope, receive, send)
    assert heard == ["http.request", "http.request", "http.disconnect"]


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    keys = ("alice=0123456789abcdef-alice", "bob=0123456789abcdef-bob")
    settings = GatewaySettings(
        target=("127.0.0.1:1",),
        upload_dir=str(tmp_path),
        api_keys=keys,
        key_concurrent_requests=1,
        max_held_mib=1,
    )
    return create_app(settings, asyncio.Event())


def _client(app: FastAPI) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return client_of(app, authorization="Bearer 0123456789abcdef-alice")


async def test_a_body_that_comes_too_slowly_is_given_up(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.door.middleware._SLOW_START_S", 0.1)
    monkeypatch.setattr("gateway.door.middleware._LEAST_RATE", 1000)

    async def dripping() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async with _client(app) as http:
        answer = await http.post("/tokenize", content=dripping())
    assert answer.status_code == 408
    assert "at least 1,000 a second are needed" in answer.json()["error"]["message"]


async def test_a_key_with_all_its_requests_running_is_told_before_its_body_is_read(
    app: FastAPI,
) -> None:
    has_begun = asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        yield b"{"
        has_begun.set()
        await asyncio.Event().wait()

    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body is read")
        yield b""

    async with _client(app) as http:
        first = asyncio.create_task(http.post("/tokenize", content=waiting()))
        await has_begun.wait()
        for path in ("/tokenize", "/v1/chat/completions", "/v1/videos"):
            refused = await http.post(path, content=unread())
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (await http.post("/tokenize", json={})).status_code == 400


async def test_a_client_that_has_its_answer_may_ask_again_at_once(app: FastAPI) -> None:
    async with _client(app) as http:
        for _ in range(20):
            assert (await http.post("/tokenize", json={})).status_code == 400


async def test_bodies_that_are_held_leave_room_for_ordinary_requests(app: FastAPI) -> None:
    """Whoever sends them, and whether or not the rest of them comes."""
    has_begun = asyncio.Event()

    async def held() -> AsyncIterator[bytes]:
        yield b'{"prompt": "' + b"a" * 500_000
        has_begun.set()
        await asyncio.Event().wait()

    bob = {"authorization": "Bearer 0123456789abcdef-bob"}
    async with _client(app) as http:  # alice's
        first = asyncio.create_task(http.post("/tokenize", content=held()))
        await has_begun.wait()
        refused = await http.post("/tokenize", json={"prompt": "a" * 600_000}, headers=bob)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert "one client's may hold 524,288" in refused.json()["error"]["message"]
        small = await http.post("/tokenize", json={"prompt": "a" * 60_000}, headers=bob)
        assert small.json()["error"]["code"] == "unavailable"  # there is no target
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        again = await http.post("/tokenize", json={"prompt": "a" * 500_000})
        assert again.json()["error"]["code"] == "unavailable"


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata": [' + b"{}," * 100_000 + b"{}]}",
        b"[" * 100_000,
        b'{"tokens": [' + b"1," * 100_000 + b"1]}",
    ],
    ids=["objects", "depth", "numbers"],
)
async def test_a_body_of_many_values_is_never_parsed(body: bytes, app: FastAPI) -> None:
    async with _client(app) as http:
        answer = await http.post("/detokenize", content=body)
    assert answer.status_code == 413
    assert "more than 65,536 values" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
async def test_values_do_not_hide_in_another_encoding(encoding: str, app: FastAPI) -> None:
    text = '{"a": "\\"", "metadata": [' + "{}," * 100_000 + "{}]}"
    async with _client(app) as http:
        answer = await http.post("/detokenize", content=text.encode(encoding))
    assert answer.status_code == 400
    assert "not UTF-8" in answer.json()["error"]["message"]


async def test_memory_is_given_back_after_a_large_request(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        "gateway.door.middleware.trim_heap", lambda: loop.call_soon_threadsafe(trimmed.set)
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await JSONResponse({})(scope, receive, send)

    async with client_of(_limited(app)) as http:
        await http.post("/", content=b" " * (1 << 10))
        await asyncio.sleep(0.2)
        assert not trimmed.is_set()
        await http.post("/", content=b" " * (1 << 21))
        await asyncio.wait_for(trimmed.wait(), 30)


async def test_every_answer_tells_browsers_to_run_nothing(app: FastAPI) -> None:
    async with _client(app) as http:
        for path in ("/health", "/v1/models", "/v1/nothing", "/docs", "/page/main.js", "/metrics"):
            answer = await http.get(path)
            assert answer.headers["x-content-type-options"] == "nosniff", path
            assert "default-src" in answer.headers["content-security-policy"], path
        assert (await http.get("/version/")).status_code == 404
        compressed = await http.post("/tokenize", headers={"content-encoding": "gzip"})
        assert compressed.headers["x-content-type-options"] == "nosniff"


async def test_the_list_of_what_there_is_loads_nothing(app: FastAPI) -> None:
    async with client_of(app) as http:
        text = (await http.get("/docs")).text
        for path in (await http.get("/openapi.json")).json()["paths"]:
            assert path in text
    assert "script" not in text
    assert "http" not in text
