"""Services whose slots are warm give what cold ones give, token for token, float32."""

import asyncio
import dataclasses
import random
from typing import Any

import pytest

from hippo.rpc.client import TargetClient
from hippo.types import (
    ChatMessage,
    Media,
    MediaKind,
    OpenRequest,
    Pruning,
    PruningStrategy,
    SamplingParams,
    TextPart,
)
from tests.support.models.pairs import NoiseDecoder, Pair
from tests.support.running.services import (
    Answer,
    backend_of,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until_free,
)

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.3)
COLD: dict[str, Any] = {"prefix_cache": False, "vision_cache_mb": 0}


def question(text: str, data: bytes = b"aaaa", **changes: Any) -> OpenRequest:
    values: dict[str, Any] = {
        "media": (Media(MediaKind.VIDEO, data),),
        "pruning": Pruning(PruningStrategy.NONE),
        "max_tokens": 12,
        "end_token_ids": (),
    }
    return toy_request(text, **(values | changes))


def next_turn(request: OpenRequest, answer: str, text: str) -> OpenRequest:
    turns = (ChatMessage("assistant", (TextPart(answer),)), ChatMessage("user", (TextPart(text),)))
    return dataclasses.replace(request, messages=(*request.messages, *turns))


def num_reused(answer: Answer) -> int:
    return answer.verdicts[0].timing.context_length


def assert_alike(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.selection is not None and expected.selection is not None
    assert answer.selection.kept_indices == expected.selection.kept_indices


async def cold_answers(pair: Pair, requests: list[OpenRequest]) -> list[Answer]:
    async with serving_target(pair.target, NoiseDecoder(), **COLD) as (_, client):
        answers = [await target_only(client, request) for request in requests]
    assert all(num_reused(answer) == 0 for answer in answers)
    return answers


@pytest.mark.parametrize(
    ("pruning", "sampling"),
    [
        (Pruning(PruningStrategy.NONE), SamplingParams()),
        (Pruning(PruningStrategy.HOLISTIC, 0.5), SAMPLED),
        (
            Pruning(PruningStrategy.SPECVLM, 0.5, causal_attention=True, compacted_positions=True),
            SAMPLED,
        ),
    ],
    ids=["unpruned, greedy", "holistic, sampled", "as SpecVLM, sampled"],
)
async def test_warm_answers_equal_cold_ones_with_and_without_a_draft(
    pair: Pair, pruning: Pruning, sampling: SamplingParams
) -> None:
    first = question("what is in the thing?", pruning=pruning, sampling=sampling)
    requests = [
        first,
        question("where does the man go?", pruning=pruning, sampling=sampling),
        first,  # once more: the question's rows are run if they are to score
        next_turn(first, "a hat", "and then?"),
        question("what is in the thing?", b"bbbb", pruning=pruning, sampling=sampling),
    ]
    cold = await cold_answers(pair, requests)
    decoder = NoiseDecoder()
    async with (
        serving_target(pair.target, decoder) as (target_service, target),
        serving_draft(pair.draft, decoder) as (draft_service, draft),
    ):
        for policy in ("off", "vpsd"):
            for request, expected in zip(requests, cold, strict=True):
                if policy == "off":
                    answer = await target_only(target, request)
                else:
                    answer = await relay(draft, target, request, policy)
                assert_alike(answer, expected)
                await until_free(target_service)
                await until_free(draft_service)
        counters = backend_of(target_service).engine.counters
        assert counters.num_prefix_hits >= 6
        assert counters.num_reused_rows > counters.num_prompt_rows // 3
        assert backend_of(target_service).engine.vision_cache.num_misses == 2
        assert backend_of(draft_service).engine.vision_cache.num_misses == 2
        assert backend_of(draft_service).engine.counters.num_prefix_hits >= 3


async def test_uv_computes_the_video_again_and_scores_it_alike(pair: Pair) -> None:
    pruning = Pruning(PruningStrategy.UV, 0.5)
    requests = [
        question(text, pruning=pruning) for text in ("what is in the thing?", "where is the man?")
    ]
    cold = await cold_answers(pair, requests)
    async with serving_target(pair.target, NoiseDecoder()) as (_, client):
        warm = [await target_only(client, request) for request in requests]
    for answer, expected in zip(warm, cold, strict=True):
        assert_alike(answer, expected)
    assert num_reused(warm[1]) > 0
    assert warm[1].selection is not None
    assert warm[1].verdicts[0].timing.num_rows > warm[1].selection.num_visual_tokens


async def test_requests_of_different_salts_share_nothing(pair: Pair) -> None:
    async with serving_target(pair.target, NoiseDecoder()) as (service, client):
        for salt in ("", "one", "other"):
            answer = await target_only(client, question("what?", cache_salt=salt))
            assert num_reused(answer) == 0
        assert backend_of(service).engine.vision_cache.num_hits == 0
        assert backend_of(service).prompts.media_cache.num_hits == 0
        again = await target_only(client, question("what?", cache_salt="other"))
        assert num_reused(again) > 0


async def test_any_order_of_questions_turns_and_departures_gives_cold_answers(pair: Pair) -> None:
    chance = random.Random(pair.target.info.family)
    pool = []
    for _ in range(10):
        request = question(
            chance.choice(("what?", "what is it?", "who is in the hat?")),
            chance.choice((b"aaaa", b"bbbb")),
            sampling=chance.choice((SamplingParams(), SAMPLED)),
            pruning=Pruning(chance.choice((PruningStrategy.NONE, PruningStrategy.ATTENTION)), 0.5),
            max_tokens=chance.randrange(1, 9),
        )
        if chance.random() < 0.4:
            request = next_turn(request, chance.choice(("a hat", "the thing")), "and now?")
        if chance.random() < 0.2:
            (message, *rest) = request.messages
            message = dataclasses.replace(message, content=tuple(reversed(message.content)))
            request = dataclasses.replace(request, messages=(message, *rest))
        pool.append(request)
    cold = await cold_answers(pair, pool)

    async def one(target: TargetClient, index: int) -> None:
        if chance.random() < 0.3:
            await leave_early(target, pool[index], num_messages=chance.randrange(4))
        else:
            answer = await target_only(target, pool[index])
            assert answer.token_ids == cold[index].token_ids, index

    async with serving_target(pair.target, NoiseDecoder(), max_waiting=8) as (service, target):
        for _ in range(8):
            indices = [chance.randrange(len(pool)) for _ in range(chance.randrange(1, 5))]
            await asyncio.gather(*(one(target, index) for index in indices))
        await until_free(service)
        assert backend_of(service).engine.counters.num_failed == 0
        assert backend_of(service).engine.counters.num_prefix_hits > 4


async def leave_early(target: TargetClient, request: OpenRequest, *, num_messages: int) -> None:
    async with target.verify(request) as stream:
        async for _ in stream:
            if num_messages == 0:
                return
            num_messages -= 1


@pytest.mark.parametrize(
    "pruning",
    [Pruning(PruningStrategy.NONE), Pruning(PruningStrategy.HOLISTIC, 0.5)],
    ids=["unpruned", "holistic"],
)
async def test_choices_that_copy_each_others_rows_equal_cold_ones(
    pair: Pair, pruning: Pruning
) -> None:
    choices = [
        question(
            "what is in the thing?",
            pruning=pruning,
            sampling=dataclasses.replace(SAMPLED, choice_index=index),
        )
        for index in range(2)
    ]
    cold = await cold_answers(pair, choices)
    decoder = NoiseDecoder()
    async with (
        serving_target(pair.target, decoder) as (_, target),
        serving_draft(pair.draft, decoder) as (_, draft),
    ):
        answers = await asyncio.gather(*(relay(draft, target, one, "vpsd") for one in choices))
    assert [one.token_ids for one in answers] == [one.token_ids for one in cold]
    assert sorted(map(num_reused, answers))[0] == 0 < max(map(num_reused, answers))
