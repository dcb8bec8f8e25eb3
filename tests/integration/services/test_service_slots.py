"""Slots of the services: who is over its time keeps none, and a full queue refuses."""

import asyncio

import pytest

from hippo.errors import DeadlineError, OverloadedError
from hippo.types import Pace, PromptInfo, StepLimits
from tests.support.models.toy_model import ToyModel
from tests.support.running.gate import Gate
from tests.support.running.gateways import CHAT, serving_toys, toy_chat
from tests.support.running.services import (
    backend_of,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until,
    until_free,
)


async def test_more_requests_than_slots_and_queue_are_turned_away_and_the_queue_moves_on() -> None:
    model = ToyModel(num_slots=1)
    gate = Gate()
    async with serving_toys(model, max_waiting=1) as http:
        model.on_piece = gate
        asking = [asyncio.create_task(http.post(CHAT, json=toy_chat())) for _ in range(3)]
        (first,), others = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        refused = first.result()
        gate.open()
        answers = await asyncio.gather(*others)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "overloaded"
    assert "all 1 slots are taken, and 1 of 1 places" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_a_sequence_over_its_time_is_ended_and_its_slot_free() -> None:
    patient = StepLimits(4, 4, wait_ns=10**15)
    request = toy_request(pace=Pace(patient, patient, 8, 4), end_token_ids=())
    async with serving_target(ToyModel()) as (service, client):
        async with client.verify(request, timeout_s=0.5) as stream:
            with pytest.raises(DeadlineError):
                async for _ in stream:
                    pass
            await until_free(service)
    async with serving_draft(ToyModel()) as (service, drafter):
        async with drafter.draft(request, timeout_s=0.5) as drafting:
            with pytest.raises(DeadlineError):
                async for _ in drafting:
                    pass
            await until_free(service)


async def test_giving_up_in_the_queue_frees_the_place() -> None:
    model = ToyModel(num_slots=1)
    async with serving_target(model, max_waiting=1) as (service, client):
        gate = Gate()
        model.on_piece = gate
        async with client.verify(toy_request()) as running:
            assert isinstance(await anext(running), PromptInfo)
            queued = asyncio.create_task(target_only(client, toy_request()))
            await until(lambda: backend_of(service).slots.num_waiting == 1)
            queued.cancel()
            await until(lambda: backend_of(service).slots.num_waiting == 0)
            gate.open()


async def test_without_a_free_slot_the_draft_refuses_at_once() -> None:
    async with serving_draft(ToyModel(num_slots=1)) as (_, client):
        async with client.draft(toy_request()) as holding:
            assert isinstance(await anext(holding), PromptInfo)
            async with client.draft(toy_request()) as refused:
                with pytest.raises(OverloadedError, match="all 1 slots are taken"):
                    await anext(refused)
