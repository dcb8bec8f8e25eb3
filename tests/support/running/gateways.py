"""A gateway in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn

from gateway.app import create_app
from gateway.common.config import GatewaySettings
from gateway.server import _bind


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
