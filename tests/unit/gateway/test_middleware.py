"""What the middleware refuses before a route sees it."""

from __future__ import annotations

import httpx
import pytest
from starlette.types import Receive, Scope, Send

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
