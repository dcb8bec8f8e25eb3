"""Gateways in this process, and what they are asked about toy models."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from gateway.answer.completion import Completion
from gateway.answer.drafting import CopyFiles
from gateway.answer.plan import SpeculationPlan
from gateway.answer.report import AnswerRecord, Timeline
from gateway.api.schemas import ChatCompletionRequest
from gateway.app import create_app
from gateway.common.config import GatewaySettings
from gateway.pairs.backends import Backends
from gateway.pairs.targets import Pair
from gateway.server import _bind
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import OpenRequest, Pruning
from tests.support.models.toy_model import ToyModel
from tests.support.running.services import no_files, serving_pair, until, with_tokenizer

CHAT = "/v1/chat/completions"


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


@asynccontextmanager
async def serving_toys(
    target: ToyModel | None = None, draft: ToyModel | None = None, *, max_waiting: int = 4
) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a gateway before a toy pair."""
    pair = (with_tokenizer(target or ToyModel()), with_tokenizer(draft or ToyModel(noise=0.3)))
    async with serving_pair(*pair, max_waiting=max_waiting) as clients:
        target_address, draft_address = ((client.address,) for client in clients)
        settings = GatewaySettings(target=target_address, draft=draft_address, calibration_share=0)
        async with serving_gateway(settings) as http:
            yield http


def toy_chat(video: bytes = b"toy:4", **fields: Any) -> dict[str, Any]:
    """A question about a toy video; its answer has as many tokens as it may have."""
    url = f"data:video/mp4;base64,{base64.b64encode(video).decode()}"
    content = [
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "text", "text": "what happens?"},
    ]
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "speculative": {"policy": "serial", "pruning": {"min_visual_tokens": 1}},
    }
    return {**body, **fields}


Named = TargetClient | DraftClient | str


async def until_up(backends: Backends, num_targets: int, num_drafts: int = 0) -> None:
    wanted = (num_targets, num_drafts)
    await until(lambda: (backends.num_targets_up, backends.num_drafts_up) == wanted)


@asynccontextmanager
async def watching(
    targets: Sequence[Named],
    drafts: Sequence[Named] = (),
    *,
    num_up: tuple[int, int] | None = None,
    **settings: Any,
) -> AsyncIterator[Backends]:
    """What a gateway has behind it: the services of these clients or addresses, once so many are
    up, or all."""
    addresses = [
        tuple(each if isinstance(each, str) else each.address for each in role)
        for role in (targets, drafts)
    ]
    backends = Backends(GatewaySettings(target=addresses[0], draft=addresses[1], **settings))
    await backends.start()
    try:
        await until_up(backends, *(num_up or (len(targets), len(drafts))))
        yield backends
    finally:
        await backends.close()


def completion_of(
    pair: Pair,
    request: OpenRequest,
    policy: str = "vpsd",
    *,
    max_draft_tokens: int = 4,
    stall_s: float = 60.0,
    record: AnswerRecord | None = None,
    copy_files: CopyFiles = no_files,
) -> Completion:
    """The gateway's part of an answer."""
    return Completion(
        request,
        plan=SpeculationPlan(policy, 4, max_draft_tokens, Pruning()),
        pairs=[pair],
        stops=(),
        draft_stall_s=stall_s,
        timeout_s=None,
        record=record
        or AnswerRecord(policy=policy, received_ns=time.monotonic_ns(), timeline=Timeline()),
        news=asyncio.Event(),
        copy_files=copy_files,
    )


async def completed(backends: Backends, request: OpenRequest, *args: Any, **kw: Any) -> Completion:
    """A ``completion_of`` with these arguments, run to its end."""
    completion = completion_of(backends.pair(None), request, *args, **kw)
    async with completion:
        await until(lambda: completion.is_over)
        error = completion.error
    completion.error = error
    return completion
