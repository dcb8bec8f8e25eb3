"""What a request held in the gateway, its media above all, is freed with it, and not only when
Python's garbage collector comes to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from gateway.answer.completion import Completion
from gateway.api.routes.chat import ChatResponse
from gateway.app import create_app
from gateway.common.config import GatewaySettings
from hippo.rpc.client import ClientStream
from hippo.types import OpenRequest
from tests.e2e.support import CHAT, Running, chat_body, data_url
from tests.support.running.services import until
from tests.support.watching.collector import living, no_collector

CHOICES = pytest.mark.parametrize("options", [{}, {"n": 2}], ids=str)
UNREADABLE = data_url(b"not a video")


@CHOICES
async def test_a_finished_answer_is_freed(
    running: Running, clip: Path, options: dict[str, Any]
) -> None:
    async with gateway(running) as http:
        for stream in (False, True):
            response = await http.post(
                CHAT, json=chat_body(data_url(clip), 24, stream=stream, **options)
            )
            assert response.status_code == 200


@CHOICES
async def test_an_answer_that_was_left_is_freed(
    running: Running, clip: Path, options: dict[str, Any]
) -> None:
    async with gateway(running) as http:
        for num_lines in (1, 8):
            request = chat_body(data_url(clip), 200, stream=True, **options)
            async with http.stream("POST", CHAT, json=request) as response:
                lines = response.aiter_lines()
                for _ in range(num_lines):
                    await anext(lines)


async def test_a_refused_request_is_freed(running: Running) -> None:
    async with gateway(running) as http:
        for stream in (False, True):
            response = await http.post(CHAT, json=chat_body(UNREADABLE, 24, stream=stream))
            assert response.status_code == 400


@contextlib.asynccontextmanager
async def gateway(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    """One in this process, before the running services; at the end nothing may be left in it."""
    settings = GatewaySettings(
        target=(f"127.0.0.1:{running.stack.port('target')}",),
        draft=(f"127.0.0.1:{running.stack.port('draft')}",),
        calibration_share=0.0,
    )
    app = create_app(settings, asyncio.Event())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, http="h11"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{host}:{port}", trust_env=False, timeout=60
        ) as http:
            while (await http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.02)
            with no_collector():
                yield http
                await until(lambda: not living(OpenRequest, ChatResponse, Completion, ClientStream))
    finally:
        server.should_exit = True
        await serving
