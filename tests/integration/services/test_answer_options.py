"""Options that shape an answer, around toy models: with a draft they give what the target alone
gives."""

import asyncio
import dataclasses
import random

import pytest

from hippo.types import Pruning, PruningStrategy, SamplingParams
from tests.support.models.toy_model import END_TOKEN_ID, ToyModel
from tests.support.running.services import (
    POLICIES,
    relay,
    serving_draft,
    serving_pair,
    serving_target,
    target_only,
    toy_request,
)

ENDS = (END_TOKEN_ID, 9)
EAGER_TO_END = tuple((token_id, 5.0) for token_id in ENDS)


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_gives_the_targets_own_answer_and_log_probabilities(
    policy: str,
) -> None:
    chance = random.Random(policy)
    num_ended = 0
    async with serving_pair(ToyModel(), ToyModel(noise=0.3)) as (target_client, draft_client):
        for num_top in (None, 0, 1, 20, None, 2):
            min_tokens = chance.choice((0, 1, 5, 17, 40))
            request = toy_request(
                f"question {chance.random()}",
                sampling=SamplingParams(
                    temperature=chance.choice((0.0, 0.7, 1.2)),
                    frequency_penalty=chance.choice((0.0, 0.3)),
                    logit_bias=EAGER_TO_END,
                    seed=chance.getrandbits(64),
                    min_tokens=min_tokens,
                ),
                end_token_ids=ENDS,
                max_tokens=40,
                num_top_logprobs=num_top,
            )
            alone = await target_only(target_client, request)
            relayed = await relay(draft_client, target_client, request, policy)

            assert relayed.token_ids == alone.token_ids
            assert not set(alone.token_ids[:min_tokens]) & set(ENDS)
            assert len(alone.token_ids) >= min_tokens
            num_ended += alone.token_ids[-1] in ENDS
            (ours, theirs) = (
                [one for verdict in answer.verdicts for one in verdict.logprobs]
                for answer in (relayed, alone)
            )
            assert len(ours) == len(theirs) == len(alone.token_ids) * (num_top is not None)
            for one, other in zip(ours, theirs, strict=True):
                assert len(one.top) == num_top
                assert [each for each, _ in one.top] == [each for each, _ in other.top]
                found, expected = (
                    [each.logprob, *(logprob for _, logprob in each.top)] for each in (one, other)
                )
                assert found == pytest.approx(expected, abs=1e-5)
    assert num_ended >= 2, "the end tokens were to be likely"


async def test_the_draft_holds_end_tokens_back_as_the_target_does() -> None:
    request = toy_request(
        sampling=SamplingParams(logit_bias=((END_TOKEN_ID, 100.0),), min_tokens=30),
        max_tokens=40,
    )
    async with serving_pair(ToyModel(), ToyModel()) as (target_client, draft_client):
        relayed = await relay(draft_client, target_client, request, "vpsd")
    assert len(relayed.token_ids) == 31 and relayed.token_ids[-1] == END_TOKEN_ID
    assert relayed.blocks and not any(verdict.is_rejection for verdict in relayed.verdicts)


@pytest.mark.parametrize("policy", POLICIES)
async def test_choices_at_once_share_a_prefill_and_equal_each_alone(policy: str) -> None:
    chance = random.Random(policy)
    target, draft = ToyModel(num_slots=3), ToyModel(num_slots=3, noise=0.3)
    async with (
        serving_target(ToyModel(), prefix_cache=False) as (_, cold_client),
        serving_target(target) as (_, target_client),
        serving_draft(draft) as (_, draft_client),
    ):
        for strategy in (PruningStrategy.NONE, PruningStrategy.UNIFORM, PruningStrategy.HOLISTIC):
            text, seed = f"question {chance.random()}", chance.getrandbits(64)
            choices = [
                toy_request(
                    text,
                    sampling=SamplingParams(temperature=1.0, seed=seed, choice_index=index),
                    pruning=Pruning(strategy, 0.5),
                    num_top_logprobs=2,
                    max_tokens=40,
                    cache_salt=strategy.value,
                )
                for index in range(3)
            ]
            alone = [(await target_only(cold_client, one)).token_ids for one in choices]
            together = await asyncio.gather(
                *(relay(draft_client, target_client, one, policy) for one in choices)
            )

            assert [answer.token_ids for answer in together] == alone
            reused = sorted(answer.verdicts[0].timing.context_length for answer in together)
            # One that comes just as another ends finds neither its sequence nor its slot.
            assert reused[0] == 0 and reused[1] in (0, reused[2]) and reused[2] >= 16
    assert target.num_copied >= 2


async def test_rows_of_a_running_sequence_are_copied_only_for_the_same_salt_and_content() -> None:
    model = ToyModel(num_slots=4)
    same = toy_request("what happens there?", pruning=Pruning(PruningStrategy.NONE))
    other = toy_request("what happens here?", pruning=Pruning(PruningStrategy.NONE))
    num_common, num_all = 16 + len("what happens "), 16 + len("what happens there?") - 1
    reused: list[int] = []
    async with serving_target(model) as (_, client):
        # Which comes first, and whether it is over, is chance; rows of one that is over stay there.
        while num_all not in reused or not model.num_copied:
            same, other = (
                dataclasses.replace(one, cache_salt=one.cache_salt + "a") for one in (same, other)
            )
            salted = dataclasses.replace(same, cache_salt=same.cache_salt + "mine")
            answers = await asyncio.gather(
                *(target_only(client, one) for one in (same, other, salted, same))
            )
            assert answers[0].token_ids == answers[3].token_ids == answers[2].token_ids
            reused = [answer.verdicts[0].timing.context_length for answer in answers]
            assert reused[1] in (0, num_common) and reused[2] == 0
            assert {reused[0], reused[3]} <= {0, num_common, num_all}


async def test_a_copied_beginning_outlives_the_sequence_it_came_from() -> None:
    model = ToyModel(num_slots=2)
    request = toy_request(pruning=Pruning(PruningStrategy.NONE), end_token_ids=(), max_tokens=100)
    async with serving_target(model) as (_, client):
        while not model.num_copied:  # unless they run beside each other, which is chance
            request = dataclasses.replace(request, cache_salt=request.cache_salt + "a")
            short = dataclasses.replace(request, max_tokens=10)
            brief, long = await asyncio.gather(
                target_only(client, short), target_only(client, request)
            )
        again = await target_only(client, request)
    assert long.token_ids == again.token_ids
    assert long.token_ids[:10] == brief.token_ids
    reused = [answer.verdicts[0].timing.context_length for answer in (brief, long)]
    assert sorted(reused) == [0, 16 + len("what happens?") - 1]


async def test_nothing_is_copied_where_prefixes_are_not_kept() -> None:
    model = ToyModel(num_slots=2)
    async with serving_target(model, prefix_cache=False) as (_, client):
        await asyncio.gather(*(target_only(client, toy_request()) for _ in range(2)))
    assert model.num_copied == 0
    assert set(model.reused) == {0}
