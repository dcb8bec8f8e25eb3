"""Both services with layers that have a state: what a follow-up goes on from, and a draft that
joins, float32."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch

from hippo.rpc.client import DraftClient
from hippo.types import (
    Block,
    OpenRequest,
    Pace,
    Pruning,
    PruningStrategy,
    SamplingParams,
    Selection,
    StepLimits,
)
from tests.integration.models.test_reuse_of_prefixes import (
    COLD,
    SAMPLED,
    assert_alike,
    next_turn,
    num_reused,
    question,
)
from tests.support.models.families import write_family
from tests.support.models.pairs import NoiseDecoder, Pair, load
from tests.support.models.quantized import FORMS, has_packages, write_quantized
from tests.support.models.reference import Reference, answer, clip, prepare, user
from tests.support.running.services import (
    backend_of,
    relay,
    serving_draft,
    serving_target,
    target_only,
    until_free,
)

PRUNED = Pruning(PruningStrategy.HOLISTIC, 0.9)
POLICIES = ("serial", "vpsd", "optimistic", "adaptive")


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("hybrids")
    return Pair(
        load(write_family(folder / "target", "qwen3_5")),
        load(write_family(folder / "draft", "qwen3_5", noise=0.02)),
    )


def questions(sampling: SamplingParams) -> list[OpenRequest]:
    changes = {"pruning": PRUNED, "sampling": sampling, "max_tokens": 24}
    first = question("what is in the thing?", b"a long clip", **changes)
    return [
        first,
        question("where does the man go?", b"a long clip", **changes),
        first,
        next_turn(first, "a hat", "and then?"),
        question("what is in the thing?", b"another", **changes),
    ]


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_follow_ups_under_every_policy_equal_cold_answers(
    hybrids: Pair, sampling: SamplingParams
) -> None:
    requests = questions(sampling)
    async with serving_target(hybrids.target, NoiseDecoder(), **COLD) as (_, client):
        cold = [await target_only(client, request) for request in requests]
    assert all(num_reused(answer) == 0 for answer in cold)
    async with (
        serving_target(hybrids.target, NoiseDecoder()) as (target_service, target),
        serving_draft(hybrids.draft, NoiseDecoder()) as (draft_service, draft),
    ):
        for policy in POLICIES:
            for request, expected in zip(requests, cold, strict=True):
                answer = await relay(draft, target, request, policy)
                assert_alike(answer, expected)
                await until_free(target_service)
                await until_free(draft_service)
            together = await asyncio.gather(
                *(relay(draft, target, request, policy) for request in requests[:2])
            )
            assert [each.token_ids for each in together] == [each.token_ids for each in cold[:2]]
            await until_free(draft_service)
        counters = backend_of(target_service).engine.counters
        assert counters.num_prefix_hits >= 3 * len(POLICIES)
        assert counters.num_failed == backend_of(draft_service).engine.counters.num_failed == 0


async def test_a_second_question_and_a_turn_run_only_their_own_rows(hybrids: Pair) -> None:
    first, second, *_ = questions(SamplingParams())
    async with serving_target(hybrids.target, NoiseDecoder()) as (_, client):
        one = await target_only(client, first)
        again = await target_only(client, second)
        text = "".join("x" for _ in one.token_ids)
        turn = await target_only(client, next_turn(second, text, "and then?"))
    assert one.selection is not None
    assert num_reused(again) > one.selection.num_visual_tokens
    assert again.verdicts[0].timing.num_rows < 40
    # The answer is other text; so the turn goes on behind the question.
    assert num_reused(turn) > num_reused(again)


async def test_choices_copy_the_state_at_the_end_of_the_video(hybrids: Pair) -> None:
    choices = [
        question(
            "what is in the thing?",
            pruning=PRUNED,
            sampling=dataclasses.replace(SAMPLED, choice_index=index),
        )
        for index in range(2)
    ]
    async with serving_target(hybrids.target, NoiseDecoder(), **COLD) as (_, client):
        cold = [await target_only(client, choice) for choice in choices]
    async with (
        serving_target(hybrids.target, NoiseDecoder()) as (_, target),
        serving_draft(hybrids.draft, NoiseDecoder()) as (_, draft),
    ):
        answers = await asyncio.gather(*(relay(draft, target, one, "vpsd") for one in choices))
    assert [one.token_ids for one in answers] == [one.token_ids for one in cold]
    assert sorted(map(num_reused, answers))[0] == 0 < max(map(num_reused, answers))


async def test_a_draft_that_joins_goes_on_as_one_from_the_start(hybrids: Pair) -> None:
    """As when a draft has died in mid-answer, and is back."""
    request = question("what?", max_tokens=200)

    async def drafted(draft: DraftClient, committed: tuple[int, ...], count: int) -> list[int]:
        pace = Pace(StepLimits(1, 8), StepLimits(1, 8), max_ahead=count, block_size=8)
        own = dataclasses.replace(request, pace=pace, committed_ids=committed)
        ids: list[int] = []
        async with draft.draft(own) as stream:
            async for message in stream:
                if not isinstance(message, Block):
                    num_visual = getattr(message, "num_visual_tokens", 0)
                    if num_visual:
                        await stream.send_message(Selection(tuple(range(num_visual)), num_visual))
                    continue
                ids += message.token_ids
                if len(ids) >= count:
                    break
        return ids[:count]

    async with serving_draft(hybrids.draft, NoiseDecoder()) as (service, draft):
        whole = await drafted(draft, (), 180)
        await until_free(service)
        assert await drafted(draft, tuple(whole[:150]), 30) == whole[150:]


@pytest.mark.skipif(not has_packages(), reason="the packages of the quantised forms are missing")
@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_form_gives_transformers_logits_of_the_same_weights(
    form: str, tmp_path: Path
) -> None:
    folder, plain = write_quantized(tmp_path, "Qwen/Qwen3.5-27B", form)
    model, reference = load(folder, max_context_length=1024), Reference(plain)
    prompt = prepare(model, user(0, "what is it?"), clip(num_frames=2))
    expected = reference.recompute(prompt, None, (5, 6, 7))[:, : model.info.num_token_ids]
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=2e-4)
