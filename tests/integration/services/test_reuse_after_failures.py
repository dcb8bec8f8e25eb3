"""What a slot is said to hold is what was written there, however its sequence ended.

The toy model asserts that reused rows are of the same content as those it is asked for.
"""

import asyncio
import random

import pytest

from hippo.errors import HippoError
from hippo.models.interface.base import StepPlan
from hippo.service.service import EngineService
from hippo.types import Block, Pace, Pruning, PruningStrategy, SamplingParams, Selection, StepLimits
from tests.support.models.toy_model import ToyModel
from tests.support.running.gate import Gate
from tests.support.running.services import (
    Answer,
    backend_of,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until,
    until_free,
)

UNPRUNED = Pruning(PruningStrategy.NONE)
DRAFTS = Pace(StepLimits(0, 4, 0), StepLimits(0, 4, 0), max_ahead=8, block_size=2)
SAMPLED = SamplingParams(temperature=0.8, seed=7)


@pytest.mark.parametrize("num_pieces", [1, 2, 3])  # before the tap of the scores and behind it
@pytest.mark.parametrize(
    ("pruning", "num_shared"),
    [(UNPRUNED, 16 + len("who ")), (Pruning(PruningStrategy.HOLISTIC, 0.5), 16)],
    ids=["unpruned", "scored"],
)
async def test_a_prefill_that_is_left_ends_and_keeps_only_what_it_took_over(
    pruning: Pruning, num_shared: int, num_pieces: int
) -> None:
    model = ToyModel(num_slots=1)
    async with serving_target(model) as (service, client):
        first, left = (toy_request(f"who {verb} it?", pruning=pruning) for verb in ("is", "was"))
        expected = await target_only(client, first)
        engine = backend_of(service).engine
        num_prefills = engine.counters.num_prefills
        gate = Gate(num_pieces)
        model.on_piece = gate
        async with client.verify(left):
            await until(gate.has_arrived.is_set)
        await until(lambda: service.num_streams == 0)
        gate.open()
        await until_free(service)
        assert not engine._sequences
        assert engine.counters.num_prefills == num_prefills
        model.on_piece = lambda _: None
        assert (await target_only(client, left)).token_ids
        again = await target_only(client, first)
        assert again.token_ids == expected.token_ids
        assert engine.counters.num_failed == 0
    assert model.reused[-3:] == [num_shared] * 3


async def test_a_sequence_left_in_a_forward_ends_and_keeps_what_was_settled_before() -> None:
    model = ToyModel(num_slots=1)
    async with serving_target(model) as (service, client):
        request = toy_request(pruning=UNPRUNED, end_token_ids=())
        expected = await target_only(client, request)
        counters = backend_of(service).engine.counters
        num_forwards = counters.num_forwards
        gate = Gate(9)
        model.on_forward = gate
        async with client.verify(request):
            await until(gate.has_arrived.is_set)
        await until(lambda: service.num_streams == 0)
        gate.open()
        await until_free(service)
        assert counters.num_forwards == num_forwards + 9
        model.on_forward = lambda _: None
        assert (await target_only(client, request)).token_ids == expected.token_ids
        assert counters.num_failed == 0


async def test_a_failed_sequence_leaves_an_empty_slot() -> None:
    model = ToyModel(num_slots=1)
    async with serving_target(model) as (service, client):
        request = toy_request(pruning=UNPRUNED)
        expected = await target_only(client, request)

        def fail(plan: StepPlan) -> None:
            model.on_forward = lambda _: None
            raise RuntimeError("a broken kernel")

        model.on_forward = fail
        with pytest.raises(HippoError):
            await target_only(client, request)
        await until_free(service)
        assert (await target_only(client, request)).token_ids == expected.token_ids
    assert model.reused[-1] == 0


def assert_slots_hold_what_they_are_said_to(service: EngineService, model: ToyModel) -> int:
    """How many rows the free slots are said to hold, all of them."""
    free = backend_of(service).slots._free
    assert len(free) == model.info.num_slots
    for slot, held in free.items():
        if len(held):
            assert model.held_ids(slot)[: len(held)] == held.table[0].tolist()
            assert len(set(held.table[-1].tolist())) == len(held), "positions are counted on"
    return sum(map(len, free.values()))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_guessed", [0, 4])
async def test_of_an_answer_the_rows_that_were_fed_and_stood_are_held(
    max_guessed: int, seed: int
) -> None:
    chance = random.Random(seed)
    target = ToyModel(num_slots=2)
    draft = ToyModel(noise=chance.choice((0.0, 0.2, 0.5)), num_slots=2)
    async with (
        serving_target(target) as (target_service, target_client),
        serving_draft(draft, max_guessed=max_guessed) as (draft_service, draft_client),
    ):
        pairs = ((target_service, target), (draft_service, draft))

        async def settled() -> None:
            for service, _ in pairs:
                await until(lambda service=service: backend_of(service).slots.num_used == 0)  # type: ignore[misc]

        for _ in range(8):
            request = toy_request(
                chance.choice(("who is it?", "what?")),
                max_tokens=chance.randrange(1, 60),
                end_token_ids=chance.choice(((), (1, 5, 9))),
                sampling=chance.choice((SamplingParams(), SAMPLED)),
                pruning=chance.choice((UNPRUNED, Pruning(PruningStrategy.UNIFORM, 0.5))),
            )
            policy = chance.choice(("vpsd", "adaptive", "serial", "optimistic"))
            relaying = asyncio.create_task(relay(draft_client, target_client, request, policy))
            if chance.random() < 0.4:
                await asyncio.sleep(chance.random() * 0.05)
                relaying.cancel()
            (outcome,) = await asyncio.gather(relaying, return_exceptions=True)
            assert isinstance(outcome, Answer | asyncio.CancelledError)
            await settled()
            for service, model in pairs:
                assert backend_of(service).engine.counters.num_failed == 0
                assert_slots_hold_what_they_are_said_to(service, model)

        whole = toy_request(pruning=UNPRUNED, end_token_ids=(), max_tokens=40)
        answer = await relay(draft_client, target_client, whole, "vpsd")
        await settled()
        assert len(answer.token_ids) == 40
        num_prompt = 16 + len("what happens?")
        assert assert_slots_hold_what_they_are_said_to(*pairs[0]) >= num_prompt + 39
        assert assert_slots_hold_what_they_are_said_to(*pairs[1]) > num_prompt


async def test_a_draft_that_joins_again_in_mid_answer_reuses_the_prompt() -> None:
    draft = ToyModel(noise=0.3, num_slots=1)
    selection = Selection(tuple(range(16)), 16)
    async with serving_draft(draft) as (service, client):
        for committed_ids in ((), (5, 6, 7)):
            request = toy_request(
                pruning=UNPRUNED, committed_ids=committed_ids, end_token_ids=(), pace=DRAFTS
            )
            async with client.draft(request) as stream:
                await stream.send_message(selection)
                async for message in stream:
                    if isinstance(message, Block):
                        break
            await until_free(service)
        assert backend_of(service).engine.counters.num_failed == 0
    assert draft.reused[-1] == 16 + len("what happens?") - 1
