"""What a request held is freed with it, not when Python's garbage collector comes to it.

A sequence holds its prompt's embeddings, a stream and a request of the gateway the whole medium.
"""

import contextlib
import time
from typing import Any

import httpx
import pytest

from gateway.answer.completion import Completion
from gateway.api.routes.chat import ChatResponse
from hippo.engine.sequence import EngineSequence
from hippo.errors import HippoError
from hippo.rpc.client import ClientStream, TargetClient
from hippo.types import Block, OpenRequest, Verdict
from tests.support.models.toy_model import ToyModel
from tests.support.running.gateways import CHAT, serving_toys, toy_chat
from tests.support.running.services import serving_target, toy_request, until
from tests.support.running.stack import value_of
from tests.support.watching.collector import living, no_collector

HELD = (OpenRequest, ChatResponse, Completion, ClientStream, EngineSequence)


@pytest.mark.parametrize("options", [{}, {"n": 2}], ids=str)
@pytest.mark.parametrize(("video", "status"), [(b"toy:4", 200), (b"not a video", 400)])
async def test_gateway_and_services_free_what_a_request_held_at_its_end(
    video: bytes, status: int, options: dict[str, Any]
) -> None:
    async with serving_toys() as http:
        with no_collector():
            for stream in (False, True):
                body = toy_chat(video, stream=stream, **options)
                assert (await http.post(CHAT, json=body)).status_code == status
            await until(lambda: not living(*HELD))


@pytest.mark.parametrize("options", [{}, {"n": 2}], ids=str)
async def test_a_client_that_goes_away_frees_what_its_request_held(options: dict[str, Any]) -> None:
    target = ToyModel()
    target.on_forward = lambda plan: time.sleep(0.01)
    async with serving_toys(target) as http:
        with no_collector():
            for num_lines in (1, 8):
                body = toy_chat(stream=True, max_tokens=400, **options)
                async with http.stream("POST", CHAT, json=body) as response:
                    lines = response.aiter_lines()
                    for _ in range(num_lines):
                        await anext(lines)
            impatient = httpx.Timeout(60, read=0.2)
            with pytest.raises(httpx.ReadTimeout):
                await http.post(CHAT, json=toy_chat(max_tokens=400, **options), timeout=impatient)
            await until(lambda: not living(*HELD))
        page = (await http.get("/metrics")).text
    cancelled = 'hippo_completions_total{outcome="cancelled",policy="serial"}'
    assert value_of(page, cancelled) == 3 * options.get("n", 1)


async def test_a_stream_that_breaks_the_order_of_messages_is_freed() -> None:
    async def break_order(client: TargetClient) -> None:
        async with client.verify(toy_request(end_token_ids=())) as stream:
            async for message in stream:
                if isinstance(message, Verdict):
                    await stream.send_message(Block(epoch=9, start_index=0, token_ids=(1,)))

    async with serving_target(ToyModel()) as (_, client):
        with no_collector():
            for _ in range(3):
                with contextlib.suppress(HippoError):
                    await break_order(client)
            await until(lambda: not living(EngineSequence, ClientStream))
