"""Slots of the services: who leaves or is over its time keeps none, and a full queue refuses."""

from __future__ import annotations

import asyncio

import pytest

from hippo.errors import DeadlineError, OverloadedError
from hippo.types import (
    Pace,
    PromptInfo,
    Pruning,
    PruningStrategy,
    StepLimits,
    Verdict,
)
from tests.support.models.toy_model import ToyModel
from tests.support.running.gate import Gate
from tests.support.running.services import (
    backend_of,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until,
    until_free,
)


@pytest.mark.parametrize("num_pieces", [1, 3])  # before the tap of the scores and behind it
async def test_cancelling_in_the_prefill_frees_the_slot(num_pieces: int) -> None:
    model = ToyModel()
    async with serving_target(model) as (service, client):
        gate = Gate(num_pieces)
        model.on_piece = gate
        request = toy_request(pruning=Pruning(PruningStrategy.HOLISTIC, 0.5))
        async with client.verify(request) as stream:
            assert isinstance(await anext(stream), PromptInfo)
            await until(gate.has_arrived.is_set)
            assert backend_of(service).slots.num_used == 1
        await until(lambda: service.num_streams == 0)
        gate.open()
        await until_free(service)
        assert backend_of(service).engine.counters.num_prefills == 0
        assert not backend_of(service).engine._sequences


async def test_cancelling_while_decoding_frees_the_slot() -> None:
    model = ToyModel()
    async with serving_target(model) as (service, client):
        gate = Gate()
        num_forwards = backend_of(service).engine.counters.num_forwards
        model.on_forward = lambda plan: gate(plan) if plan.sequences[0].start_index == 5 else None
        async with client.verify(toy_request(end_token_ids=())) as stream:
            async for message in stream:
                if isinstance(message, Verdict) and message.start_index == 3:
                    break
            await until(gate.has_arrived.is_set)
        await until(lambda: service.num_streams == 0)
        gate.open()
        await until_free(service)
        assert backend_of(service).engine.counters.num_forwards == num_forwards + 6


async def test_with_slots_and_queue_full_the_target_refuses_and_the_queue_moves_on() -> None:
    model = ToyModel(num_slots=1)
    request = toy_request(max_tokens=4, end_token_ids=())
    async with serving_target(model, max_waiting=1) as (service, client):
        gate = Gate()
        model.on_piece = gate
        async with client.verify(request) as running:
            assert isinstance(await anext(running), PromptInfo)
            queued = asyncio.create_task(target_only(client, request))
            await until(lambda: backend_of(service).slots.num_waiting == 1)

            with pytest.raises(OverloadedError, match="all 1 slots are taken, and 1 of 1 places"):
                await target_only(client, request)

            gate.open()
            async for _ in running:
                pass
        assert len((await queued).token_ids) == 4
        assert backend_of(service).slots.num_waiting == 0


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
