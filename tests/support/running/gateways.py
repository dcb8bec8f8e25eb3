"""Gateways in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from gateway.api.schemas import ChatCompletionRequest
from gateway.app import create_app
from gateway.common.config import GatewaySettings
from gateway.server import _bind


def chat_request(**fields: Any) -> ChatCompletionRequest:
    """A request that says "Hi", unless the fields say otherwise."""
    messages = [{"role": "user", "content": "Hi"}]
    return ChatCompletionRequest.model_validate({"model": "m", "messages": messages, **fields})


class Clock:
    """Tells a time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def serving_gateway(settings: GatewaySettings) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a gateway that finds its services ready."""
    config = uvicorn.Config(
        create_app(settings, asyncio.Event()), log_config=None, access_log=False, http="h11"
    )
    server, listener = uvicorn.Server(config), _bind("127.0.0.1", 0)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    drafts = ("ready",) if settings.draft else ("ready", "unavailable")
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as http:
        while not server.started or (await http.get("/ready")).json().get("draft") not in drafts:
            await asyncio.sleep(0.01)
        yield http
    server.should_exit = True
    await running
    listener.close()


@asynccontextmanager
async def client_of(app: ASGIApp, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client that calls an application without a socket."""
    transport: Any = httpx.ASGITransport(app)
    life = app.router.lifespan_context(app) if isinstance(app, FastAPI) else nullcontext()
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")
    async with asyncio.timeout(30), life, client as http:
        http.headers.update(headers)
        yield http
