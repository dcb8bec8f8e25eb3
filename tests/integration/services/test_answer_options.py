"""Options that shape an answer, grammars among them, around toy models: with a draft they give
what the target alone gives."""

import asyncio
import dataclasses
import json
import math
import random
import re
import threading
from typing import Any

import pytest
from llguidance import grammar_from

from hippo.errors import InvalidRequestError
from hippo.sampling.masks import TokenMasks
from hippo.types import Block, Pace, Pruning, PruningStrategy, SamplingParams, Selection
from tests.support.models.letters import letter_tokenizer
from tests.support.models.toy_model import END_TOKEN_ID, NUM_TOKEN_IDS, ToyModel
from tests.support.running.gateways import CHAT, serving_toys, toy_chat
from tests.support.running.services import (
    POLICIES,
    backend_of,
    relay,
    serving_draft,
    serving_pair,
    serving_target,
    target_only,
    toy_request,
    until_free,
)

ENDS = (END_TOKEN_ID, 9)
EAGER_TO_END = tuple((token_id, 5.0) for token_id in ENDS)


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_gives_the_targets_own_answer_and_log_probabilities(policy: str) -> None:
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
        sampling=SamplingParams(logit_bias=((END_TOKEN_ID, 100.0),), min_tokens=30), max_tokens=40
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


async def test_a_stop_string_ends_an_answer_once_it_has_min_tokens() -> None:
    used = []
    async with serving_toys() as http:
        for min_tokens in (0, 24):
            answer = await http.post(CHAT, json=toy_chat(stop=["w"], min_tokens=min_tokens))
            used.append(answer.json()["usage"]["completion_tokens"])
    assert used == [1, 25]


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


async def test_nothing_is_copied_where_prefixes_are_not_kept() -> None:
    model = ToyModel(num_slots=2)
    async with serving_target(model, prefix_cache=False) as (_, client):
        await asyncio.gather(*(target_only(client, toy_request()) for _ in range(2)))
    assert model.num_copied == 0
    assert set(model.reused) == {0}


LETTERS = [*'abcdefghxyz{}[]":, 0123456789', "ab", "abc", '":', '{"', '",', "12", "}]", "xyz"]
SPECIAL = ("<pad>", "<end>", "<video>")
TEXTS = [*SPECIAL, *LETTERS]
TEXTS += [f"q{number}" for number in range(NUM_TOKEN_IDS - len(TEXTS))]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-h ]{2,20}$"},
        "b": {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 2, "maxItems": 6},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = grammar_from("json", json.dumps(SCHEMA))
FORMED = toy_request(sampling=SamplingParams(grammar=JSON), max_tokens=120)
HOT = toy_request(
    sampling=SamplingParams(temperature=1.0, seed=3, grammar=JSON),
    pace=Pace(max_ahead=12, block_size=4),
    max_tokens=120,
)
REGEXES = ("(ab|abc|x[yz]){5,12}", "[a-h]{3}( [a-h]{3}){2,6}", "(xyz)?a*b{4,9}")


def _lettered(**options: Any) -> ToyModel:
    """A model with a tokenizer in which its ids stand for ``TEXTS``."""
    model = ToyModel(**options)
    model.info = dataclasses.replace(model.info, tokenizer_json=letter_tokenizer(TEXTS, SPECIAL))
    return model


def _text(token_ids: list[int]) -> str:
    assert token_ids[-1] == END_TOKEN_ID
    return "".join(TEXTS[token_id] for token_id in token_ids[:-1])


@pytest.mark.parametrize("are_slow", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
async def test_with_a_grammar_every_policy_gives_the_targets_own_answer(
    policy: str, are_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all masks are slow."""
    if are_slow:
        monkeypatch.setattr(TokenMasks, "expected_ns", math.inf)
    chance = random.Random(policy)
    num_accepted = num_rejected = 0
    async with serving_pair(_lettered(), _lettered(noise=0.3)) as (target, draft):
        for grammar in (JSON, *REGEXES):
            request = toy_request(
                f"question {chance.random()}",
                sampling=SamplingParams(
                    temperature=chance.choice((0.0, 0.7, 1.2)),
                    top_p=chance.choice((1.0, 0.9)),
                    frequency_penalty=chance.choice((0.0, 0.3)),
                    seed=chance.getrandbits(64),
                    min_tokens=chance.choice((0, 9, 40)),
                    grammar=grammar if grammar == JSON else grammar_from("regex", grammar),
                ),
                max_tokens=120,
                num_top_logprobs=chance.choice((None, 2)),
            )
            alone, relayed = await asyncio.gather(
                target_only(target, request), relay(draft, target, request, policy)
            )
            assert relayed.token_ids == alone.token_ids
            text = _text(alone.token_ids)
            if grammar == JSON:
                assert list(json.loads(text)) == ["a", "b"]
            else:
                assert re.fullmatch(grammar, text)
            num_accepted += sum(verdict.num_accepted_tokens for verdict in relayed.verdicts)
            num_rejected += sum(verdict.is_rejection for verdict in relayed.verdicts)
    # The adaptive policy may rest all the time: it goes by measured times.
    assert policy in ("off", "adaptive") or (num_accepted and num_rejected)


def _hold_slow_masks(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    may_go_on, compute = threading.Event(), TokenMasks._compute

    def compute_in_time(masks: TokenMasks, output: list[int], draft: tuple[int, ...]) -> object:
        if threading.current_thread().name.startswith("slow-masks"):
            assert may_go_on.wait(60)
        return compute(masks, output, draft)

    monkeypatch.setattr(TokenMasks, "_compute", compute_in_time)
    return may_go_on


async def test_nobody_waits_for_the_slow_masks_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = _hold_slow_masks(monkeypatch)
    plain, quick = toy_request(max_tokens=40), dataclasses.replace(FORMED, request_id="quick")
    async with serving_target(_lettered(num_slots=2)) as (_, client):
        monkeypatch.setattr(TokenMasks, "expected_ns", 0.0)
        expected = await target_only(client, FORMED)
        monkeypatch.setattr(TokenMasks, "expected_ns", math.inf)
        waiting = asyncio.create_task(target_only(client, FORMED))
        for _ in range(2):
            assert (await target_only(client, plain)).token_ids
        assert not waiting.done()
        monkeypatch.setattr(TokenMasks, "expected_ns", 0.0)
        assert (await target_only(client, quick)).token_ids == expected.token_ids
        may_go_on.set()
        assert (await waiting).token_ids == expected.token_ids


async def test_an_answer_that_ends_while_its_masks_are_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TokenMasks, "expected_ns", math.inf)
    may_go_on = _hold_slow_masks(monkeypatch)
    async with serving_target(_lettered(num_slots=1)) as (service, client):
        waiting = asyncio.create_task(target_only(client, FORMED))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await until_free(service)
        may_go_on.set()
        assert (await target_only(client, toy_request(max_tokens=40))).token_ids
        assert json.loads(_text((await target_only(client, FORMED)).token_ids))


async def test_a_draft_that_joins_in_mid_answer_follows_the_grammar() -> None:
    async with serving_pair(_lettered(), _lettered()) as (target, draft):
        alone = await target_only(target, dataclasses.replace(HOT, pace=Pace()))
        joined = dataclasses.replace(HOT, committed_ids=tuple(alone.token_ids[:7]))
        drafted: list[int] = []
        async with draft.draft(joined) as stream:
            await stream.send_message(Selection(tuple(range(16)), 16))
            async for message in stream:
                if isinstance(message, Block):
                    drafted += message.token_ids
                    if len(drafted) >= 8:
                        break
    assert drafted[:8] == alone.token_ids[7:15]


async def test_a_grammar_that_cannot_be_used_ends_only_its_sequence() -> None:
    async with serving_target(_lettered()) as (service, client):
        for grammar in (grammar_from("regex", "("), grammar_from("regex", "é")):
            with pytest.raises(InvalidRequestError) as refusal:
                sampling = SamplingParams(grammar=grammar)
                await target_only(client, toy_request(sampling=sampling))
            assert refusal.value.param == "sampling.grammar"
        await until_free(service)
        assert backend_of(service).info.takes_grammars
        good = SamplingParams(grammar=grammar_from("regex", "abc"))
        answer = await target_only(client, toy_request(sampling=good))
    assert _text(answer.token_ids) == "abc"


async def test_a_service_without_a_readable_tokenizer_refuses_grammars() -> None:
    async with serving_target(ToyModel()) as (service, client):
        assert not backend_of(service).info.takes_grammars
        with pytest.raises(InvalidRequestError, match="takes no grammar"):
            await target_only(client, FORMED)
        assert len((await target_only(client, toy_request())).token_ids) > 1
