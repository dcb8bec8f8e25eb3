"""A prompt whose rest is short is run in the next forward of the sequences that decode."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
import torch

from hippo.models.base import StepPlan
from hippo.rpc.client import TargetClient
from hippo.types import OpenRequest, SamplingParams, Verdict
from tests.support.gate import Gate
from tests.support.services import (
    Answer,
    relay,
    serving_draft,
    serving_target,
    stats_of,
    target_only,
    toy_request,
    until,
)
from tests.support.toy_model import ToyModel

SAMPLED = SamplingParams(temperature=0.8, seed=7, presence_penalty=0.5, repetition_penalty=1.2)
NUM_SLOTS = 3


class UnhurriedModel(ToyModel):
    """Forwards take a moment, in which others come."""

    is_joining = True

    def __init__(self) -> None:
        super().__init__(num_slots=NUM_SLOTS)

    @property
    def joins_tails(self) -> bool:
        return self.is_joining

    def forward(self, plan: StepPlan) -> torch.Tensor:
        time.sleep(0.001)
        return super().forward(plan)


def ask(text: str, **changes: object) -> OpenRequest:
    return toy_request(text, **{"max_tokens": 12, "end_token_ids": (), **changes})


LONG = ask("tell me all", max_tokens=400)
QUESTIONS = [ask(f"tell who is number {number}", sampling=SAMPLED) for number in range(6)]


@pytest.mark.parametrize("policy", ["off", "vpsd"])
async def test_further_questions_join_and_all_answers_are_those_of_each_alone(
    policy: str,
) -> None:
    model, draft_model = UnhurriedModel(), ToyModel(num_slots=NUM_SLOTS, noise=0.4)
    alone = await cold([LONG, *QUESTIONS])
    async with serving_target(model) as (_, target), serving_draft(draft_model) as (_, draft):
        async with running(target, LONG) as long_answer:
            for question, expected in zip(QUESTIONS, alone[1:], strict=True):
                if policy == "off":
                    answer = await target_only(target, question)
                else:
                    answer = await relay(draft, target, question, policy)
                assert answer.token_ids == expected.token_ids
        assert (await long_answer).token_ids == alone[0].token_ids
    assert len(model.joined) == len(QUESTIONS)
    assert all(num_rows < 20 for num_rows in model.joined), "the question's rows alone"


async def test_what_it_joined_is_told_and_counted() -> None:
    model = UnhurriedModel()
    async with serving_target(model) as (service, client):
        async with running(client, LONG) as long_answer:
            await target_only(client, QUESTIONS[0])
            answer = await target_only(client, QUESTIONS[1])
        counters = stats_of(service).counters
        assert counters.num_prefills == 3
        assert counters.num_joined == len(model.joined) > 0
        first = answer.verdicts[0].timing
        assert first.num_rows == model.joined[-1]
        assert first.forward_ns >= 1_000_000  # the forward's, which is not its own alone
        shared = [plan for plan in model.plans if plan.tails]
        told = {verdict.timing.num_batch_rows for verdict in (await long_answer).verdicts[1:]}
        assert {plan.num_rows for plan in shared} <= told


async def test_questions_at_once_share_a_forward() -> None:
    model, gate = UnhurriedModel(), Gate()
    alone = await cold([LONG, *QUESTIONS[:2]])
    async with serving_target(model) as (_, client):
        async with running(client, LONG) as long_answer:
            model.on_forward = gate
            await until(gate.has_arrived.is_set)
            asked = [asyncio.create_task(target_only(client, one)) for one in QUESTIONS[:2]]
            await asyncio.sleep(0.1)  # both are with the engine
            gate.open()
            assert [(await one).token_ids for one in asked] == [one.token_ids for one in alone[1:]]
        assert (await long_answer).token_ids == alone[0].token_ids
    assert max(len(plan.tails) for plan in model.plans) == 2


async def test_when_a_forward_with_a_tail_fails_both_go_on_alone() -> None:
    model = UnhurriedModel()
    failed: list[StepPlan] = []

    def fail(plan: StepPlan) -> None:
        if plan.tails:
            failed.append(plan)
            raise RuntimeError("a kernel failed")

    model.on_forward = fail
    alone = await cold([LONG, QUESTIONS[0]])
    async with serving_target(model) as (service, client):
        async with running(client, LONG) as long_answer:
            answer = await target_only(client, QUESTIONS[0])
        assert answer.token_ids == alone[1].token_ids
        assert (await long_answer).token_ids == alone[0].token_ids
        assert stats_of(service).counters.num_failed == 0
    assert failed
    assert not model.joined


async def test_who_leaves_in_the_shared_forward_frees_the_slot() -> None:
    model, gate = UnhurriedModel(), Gate()
    model.on_forward = lambda plan: gate(plan) if plan.tails else None
    alone = await cold([LONG, QUESTIONS[1]])
    async with serving_target(model) as (service, client):
        async with running(client, LONG) as long_answer:
            async with client.verify(QUESTIONS[0]):
                await until(gate.has_arrived.is_set)
            gate.open()
            await until(lambda: stats_of(service).num_slots_used == 1)
            assert (await target_only(client, QUESTIONS[1])).token_ids == alone[1].token_ids
        assert (await long_answer).token_ids == alone[0].token_ids
        await until(lambda: stats_of(service).num_slots_used == 0)


async def test_a_model_whose_steps_take_no_tail_is_given_none() -> None:
    model = UnhurriedModel()
    model.is_joining = False
    async with serving_target(model) as (_, client), running(client, LONG):
        for question in QUESTIONS:
            await target_only(client, question)
    assert not model.joined


@contextlib.asynccontextmanager
async def running(
    client: TargetClient, request: OpenRequest
) -> AsyncIterator[asyncio.Task[Answer]]:
    """An answer whose first tokens are there."""
    has_begun = asyncio.Event()

    async def follow() -> Answer:
        answer = Answer()
        async with client.verify(request) as stream:
            async for message in stream:
                if isinstance(message, Verdict):
                    has_begun.set()
                    answer.verdicts.append(message)
                    answer.token_ids += message.token_ids
        return answer

    task = asyncio.create_task(follow())
    await has_begun.wait()
    yield task
    assert not task.done(), "it was over too soon to be joined"
    await task


async def cold(requests: list[OpenRequest]) -> list[Answer]:
    """Each alone."""
    async with serving_target(UnhurriedModel(), prefix_cache=False) as (_, client):
        return [await target_only(client, request) for request in requests]
