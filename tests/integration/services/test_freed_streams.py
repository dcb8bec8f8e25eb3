"""What a stream held is freed with it, not when Python's garbage collector comes to it.

A sequence holds its prompt's embeddings, a client's stream the whole medium.
"""

from __future__ import annotations

import contextlib

import pytest

from hippo.engine.sequence import EngineSequence
from hippo.errors import HippoError
from hippo.rpc.client import ClientStream, TargetClient
from hippo.types import Block, Media, MediaKind, OpenRequest, Verdict
from tests.support.models.toy_model import ToyModel
from tests.support.running.services import (
    relay,
    serving_draft,
    serving_target,
    toy_request,
    until,
    until_free,
)
from tests.support.watching.collector import living, no_collector

ENDLESS = toy_request(end_token_ids=())
UNREADABLE = toy_request(media=(Media(MediaKind.VIDEO, b"not a video"),))


@pytest.mark.parametrize(
    ("request_", "end"),
    [
        pytest.param(ENDLESS, "finished", id="finished"),
        pytest.param(ENDLESS, "left", id="left"),
        pytest.param(ENDLESS, "broken", id="out-of-order"),
        pytest.param(UNREADABLE, "refused", id="refused"),
    ],
)
async def test_a_target_stream_is_freed_at_its_end(request_: OpenRequest, end: str) -> None:
    async with serving_target(ToyModel()) as (service, client):
        with no_collector():
            for _ in range(3):
                with contextlib.suppress(HippoError):
                    await verify(client, request_, end)
            await until_free(service)
            await until(lambda: not living(EngineSequence, ClientStream))


async def test_both_streams_of_an_answer_are_freed_at_its_end() -> None:
    async with (
        serving_target(ToyModel()) as (_, target),
        serving_draft(ToyModel(noise=0.4)) as (_, draft),
    ):
        with no_collector():
            for _ in range(3):
                await relay(draft, target, ENDLESS, "serial")
            await until(lambda: not living(EngineSequence, ClientStream))


async def verify(client: TargetClient, request: OpenRequest, end: str) -> None:
    """Runs one stream until it ``end``\\ s so."""
    async with client.verify(request) as stream:
        async for message in stream:
            if isinstance(message, Verdict) and end == "left":
                return
            if isinstance(message, Verdict) and end == "broken":
                await stream.send_message(Block(epoch=9, start_index=0, token_ids=(1,)))
