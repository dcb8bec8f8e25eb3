"""Options that shape an answer, around toy models: with a draft they give what the target alone
gives."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
import torch

from hippo.models.base import StepPlan
from hippo.types import SamplingParams
from tests.support.services import (
    POLICIES,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)
from tests.support.toy_model import END_TOKEN_ID, ToyModel

ENDS = (END_TOKEN_ID, 9)
EAGER_TO_END = tuple((token_id, 5.0) for token_id in ENDS)


@pytest.mark.parametrize("policy", POLICIES)
async def test_with_min_tokens_every_policy_gives_the_targets_own_answer(policy: str) -> None:
    chance = random.Random(policy)
    num_ended = 0
    async with (
        serving_target(ToyModel()) as (_, target_client),
        serving_draft(ToyModel(noise=0.3)) as (_, draft_client),
    ):
        for _ in range(6):
            min_tokens = chance.choice((0, 1, 5, 17, 40))
            request = toy_request(
                f"question {chance.random()}",
                sampling=SamplingParams(
                    temperature=chance.choice((0.0, 0.7, 1.2)),
                    logit_bias=EAGER_TO_END,
                    seed=chance.getrandbits(64),
                    min_tokens=min_tokens,
                ),
                end_token_ids=ENDS,
                max_tokens=40,
            )
            alone = await target_only(target_client, request)
            relayed = await relay(draft_client, target_client, request, policy)

            assert relayed.token_ids == alone.token_ids
            assert not set(alone.token_ids[:min_tokens]) & set(ENDS)
            assert len(alone.token_ids) >= min_tokens
            num_ended += alone.token_ids[-1] in ENDS
    assert num_ended >= 2, "the end tokens were to be likely"


async def test_the_draft_holds_end_tokens_back_as_the_target_does() -> None:
    request = toy_request(
        sampling=SamplingParams(logit_bias=((END_TOKEN_ID, 100.0),), min_tokens=30),
        max_tokens=40,
    )
    target, draft = ToyModel(), ToyModel()
    has_drafted = threading.Event()

    def wait_for_draft(plan: StepPlan) -> None:
        has_drafted.wait(20)

    async with (
        serving_target(target) as (_, target_client),
        serving_draft(draft) as (_, draft_client),
    ):
        draft.on_forward = lambda plan: has_drafted.set()
        target.on_forward = wait_for_draft
        relayed = await relay(draft_client, target_client, request, "vpsd")

    assert len(relayed.token_ids) == 31 and relayed.token_ids[-1] == END_TOKEN_ID
    drafted = [
        (place, token_id)
        for block in relayed.blocks
        for place, token_id in enumerate(block.token_ids, block.start_index)
    ]
    assert drafted
    assert all((token_id == END_TOKEN_ID) == (place == 30) for place, token_id in drafted)
    assert not any(verdict.is_rejection for verdict in relayed.verdicts)


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_tells_the_targets_own_log_probabilities(policy: str) -> None:
    chance = random.Random(policy)
    target = ToyModel()
    async with (
        serving_target(target) as (_, target_client),
        serving_draft(ToyModel(noise=0.3)) as (_, draft_client),
    ):
        for num_top in (0, 1, 20):
            request = toy_request(
                f"question {chance.random()}",
                sampling=SamplingParams(
                    temperature=chance.choice((0.0, 0.9)),
                    frequency_penalty=0.3,
                    logit_bias=EAGER_TO_END,
                    seed=chance.getrandbits(64),
                ),
                end_token_ids=chance.choice(((), ENDS)),
                num_top_logprobs=num_top,
            )
            alone = await target_only(target_client, request)
            relayed = await relay(draft_client, target_client, request, policy)

            assert relayed.token_ids == alone.token_ids
            (ours, theirs) = (
                [one for verdict in answer.verdicts for one in verdict.logprobs]
                for answer in (relayed, alone)
            )
            assert len(ours) == len(theirs) == len(alone.token_ids)
            for one, other in zip(ours, theirs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert len(one.top) == num_top
                assert [token_id for token_id, _ in one.top] == [
                    token_id for token_id, _ in other.top
                ]
                assert [logprob for _, logprob in one.top] == pytest.approx(
                    [logprob for _, logprob in other.top], abs=1e-5
                )


async def test_sequences_with_and_without_log_probabilities_share_a_forward() -> None:
    model = ToyModel()
    requests = [toy_request(num_top_logprobs=wanted) for wanted in (None, 3)]
    async with serving_target(model) as (_, client):
        answers = await asyncio.gather(*(target_only(client, request) for request in requests))
    plain, told = answers
    assert plain.token_ids == told.token_ids
    assert not any(verdict.logprobs for verdict in plain.verdicts)
    for verdict in told.verdicts:
        for token_id, one in zip(verdict.token_ids, verdict.logprobs, strict=True):
            assert one.top[0] == (token_id, one.logprob)  # greedy
            assert sum(torch.tensor([p for _, p in one.top]).exp()) <= 1.0 + 1e-5
