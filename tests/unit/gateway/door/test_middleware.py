"""What the middleware refuses before a route sees it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from gateway.app import create_app
from gateway.common.budget import ByteBudget
from gateway.common.config import GatewaySettings
from gateway.common.metrics import GatewayMetrics
from gateway.door.middleware import RequestMiddleware
from tests.support.running.gateways import client_of


def _gateway(folder: Path, **settings: Any) -> FastAPI:
    given = GatewaySettings(target=("127.0.0.1:1",), upload_dir=str(folder), **settings)
    return create_app(given, asyncio.Event())


def _error(answer: httpx.Response, status: int) -> dict[str, str]:
    """Of an answer with this status."""
    assert answer.status_code == status, answer.text
    error: dict[str, str] = answer.json()["error"]
    return error


@asynccontextmanager
async def _sending(http: httpx.AsyncClient, piece: bytes) -> AsyncIterator[None]:
    """While this lasts, a request has sent a piece of its body and nothing more."""
    has_begun = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield piece
        has_begun.set()
        await asyncio.Event().wait()

    sending = asyncio.create_task(http.post("/tokenize", content=body()))
    await has_begun.wait()
    yield
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/videos", "the video is larger than 100 bytes, this server's limit (--max-media-"),
        ("/v1/models", "the request body is larger than 10 bytes, this server's limit (--max-body"),
    ],
)
async def test_what_is_too_large_is_told_the_operators_limit(
    path: str, words: str, tmp_path: Path
) -> None:
    async with client_of(_gateway(tmp_path, max_body_bytes=10, max_media_bytes=100)) as http:
        answer = await http.post(path, content=bytes(1 << 17))
    assert _error(answer, 413)["message"].startswith(words)


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

    async def stalled() -> AsyncIterator[bytes]:
        yield piece
        await asyncio.Event().wait()

    async with client_of(_gateway(tmp_path, max_upload_bytes=1000)) as http:
        answer = await http.post(path, content=stalled(), headers={"content-type": content_type})
        assert _error(answer, 408)["code"] == "body_stalled"
        assert answer.headers["connection"] == "close"
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
    metrics = GatewayMetrics(max_draft_tokens=1)
    limits = {"max_body_bytes": 10, "max_file_bytes": 100}
    within = RequestMiddleware(app, **limits, budget=ByteBudget(1 << 30), metrics=metrics)
    await within(scope, receive, send)
    assert heard == ["http.request", "http.request", "http.disconnect"]


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    keys = ("alice=0123456789abcdef-alice", "bob=0123456789abcdef-bob")
    return _gateway(tmp_path, api_keys=keys, key_concurrent_requests=1, max_held_mib=1)


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
    assert "at least 1,000 a second are needed" in _error(answer, 408)["message"]


async def test_a_key_with_all_its_requests_running_is_told_before_its_body_is_read(
    app: FastAPI,
) -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body is read")
        yield b""

    async with _client(app) as http:
        async with _sending(http, b"{"):
            for path in ("/tokenize", "/v1/chat/completions", "/v1/videos"):
                refused = await http.post(path, content=unread())
                assert _error(refused, 429)["code"] == "rate_limit_exceeded"
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["connection"] == "close"
        assert (await http.post("/tokenize", json={})).status_code == 400


async def test_a_client_that_has_its_answer_may_ask_again_at_once(app: FastAPI) -> None:
    async with _client(app) as http:
        for _ in range(20):
            assert (await http.post("/tokenize", json={})).status_code == 400


async def test_bodies_that_are_held_leave_room_for_ordinary_requests(app: FastAPI) -> None:
    """Whoever sends them, and whether or not the rest of them comes."""
    bob = {"authorization": "Bearer 0123456789abcdef-bob"}
    async with _client(app) as http:  # alice's
        async with _sending(http, b'{"prompt": "' + b"a" * 500_000):
            refused = await http.post("/tokenize", json={"prompt": "a" * 600_000}, headers=bob)
            error = _error(refused, 503)
            assert error["code"] == "overloaded"
            assert "one client's may hold 524,288" in error["message"]
            small = await http.post("/tokenize", json={"prompt": "a" * 60_000}, headers=bob)
            assert _error(small, 503)["code"] == "unavailable"  # there is no target
        again = await http.post("/tokenize", json={"prompt": "a" * 500_000})
        assert _error(again, 503)["code"] == "unavailable"


HIDDEN = '{"a": "\\"", "metadata": [' + "{}," * 100_000 + "{}]}"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ('{"metadata": [' + "{}," * 100_000 + "{}]}", "utf-8"),
        ("[" * 100_000, "utf-8"),
        ('{"tokens": [' + "1," * 100_000 + "1]}", "utf-8"),
        *((HIDDEN, encoding) for encoding in ("utf-16", "utf-16-be", "utf-32")),
    ],
    ids=["objects", "depth", "numbers", "utf-16", "utf-16-be", "utf-32"],
)
async def test_a_body_of_many_values_is_never_parsed(
    text: str, encoding: str, app: FastAPI
) -> None:
    async with _client(app) as http:
        answer = await http.post("/detokenize", content=text.encode(encoding))
    is_told = (413, "more than 65,536 values") if encoding == "utf-8" else (400, "not UTF-8")
    assert is_told[1] in _error(answer, is_told[0])["message"]


async def test_memory_is_given_back_after_a_large_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        "gateway.door.middleware.trim_heap", lambda: loop.call_soon_threadsafe(trimmed.set)
    )
    async with client_of(_gateway(tmp_path)) as http:
        await http.post("/tokenize", content=b" " * (1 << 10))
        await asyncio.sleep(0.2)
        assert not trimmed.is_set()
        await http.post("/tokenize", content=b" " * (1 << 21))
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
