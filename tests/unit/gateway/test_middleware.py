"""What the middleware refuses before a route sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.app import create_app
from gateway.config import GatewaySettings
from gateway.metrics import GatewayMetrics
from gateway.middleware import RequestMiddleware


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

    metrics = GatewayMetrics(max_draft_tokens=1, version="0")
    limited = RequestMiddleware(app, max_body_bytes=10, max_file_bytes=100, metrics=metrics)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(limited), base_url="http://gateway"
    ) as http:
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
    monkeypatch.setattr("gateway.middleware._LONGEST_PAUSE_S", 0.05)
    settings = GatewaySettings(
        target=("127.0.0.1:1",), upload_dir=str(tmp_path), max_upload_bytes=1000
    )
    app = create_app(settings, asyncio.Event())

    async def stalled() -> AsyncIterator[bytes]:
        yield piece
        await asyncio.Event().wait()

    async with (
        asyncio.timeout(30),
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http,
    ):
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
    monkeypatch.setattr("gateway.middleware._LONGEST_PAUSE_S", 0.01)
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

    metrics = GatewayMetrics(max_draft_tokens=1, version="0")
    limited = RequestMiddleware(app, max_body_bytes=10, max_file_bytes=100, metrics=metrics)
    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/models", "headers": []}
    await limited(scope, receive, send)
    assert heard == ["http.request", "http.request", "http.disconnect"]
