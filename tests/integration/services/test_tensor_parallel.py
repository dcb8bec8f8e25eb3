"""A model on two ranks gives what it gives on one, float32, and its ranks stay in step."""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from llguidance import grammar_from

from hippo.errors import ContextLengthError
from hippo.models.interface.base import (
    AttentionTap,
    DecodedMedia,
    Prompt,
    SequenceRows,
    StepPlan,
    VideoLanguageModel,
)
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.types import FramePlan, Media, OpenRequest, Pruning, PruningStrategy, SamplingParams
from tests.support.devices.parallel import two_ranks
from tests.support.models.reference import assert_close, clip, prepare, user
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

IDS = tuple(range(40, 64))
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)


class Models(NamedTuple):
    """A checkpoint in one process and on two ranks, and a draft for it."""

    one: VideoLanguageModel
    two: VideoLanguageModel
    draft: VideoLanguageModel


class NoiseDecoder:
    """Frames of seeded noise instead of a decoded file."""

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        return dataclasses.replace(clip(num_frames=4, seed=len(media.data)), kind=media.kind)


# What ranks share are the text layers, and these two have all that those of a family may have:
# Qwen2's have biases and one axis of positions; Qwen3's norms of queries and keys, heads wider
# than their share of a row, and here three axes of positions and features for several layers.
PAIRS = {
    "llava-onevision": ("llava_checkpoint", "llava_draft_checkpoint"),
    "qwen3-vl": ("qwen3_checkpoint", "qwen3_draft_checkpoint"),
}


@pytest.fixture(scope="module", params=PAIRS.values(), ids=[*PAIRS])
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    target, draft = request.param
    folder: Path = request.getfixturevalue(target)
    one, small = (
        load_model(
            LoadPlan(
                str(request.getfixturevalue(name)),
                dtype="float32",
                num_slots=3,
                max_context_length=512,
            )
        )
        for name in (target, draft)
    )
    with two_ranks(folder) as (two, _):
        yield Models(one, two, small)


@pytest.fixture(scope="module")
def prompt(models: Models) -> Prompt:
    return prepare(models.one, user(0, "what is in the thing?"), clip())


async def alone(model: VideoLanguageModel, requests: Sequence[OpenRequest]) -> list[Answer]:
    """The answers of a target on one rank that keeps nothing."""
    async with serving_target(model, NoiseDecoder(), prefix_cache=False) as (_, client):
        return [await target_only(client, request) for request in requests]


def assert_equal(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.selection is not None and expected.selection is not None
    assert answer.selection.kept_indices == expected.selection.kept_indices


def step(*sequences: tuple[int, int, tuple[int, ...]]) -> StepPlan:
    return StepPlan(tuple(SequenceRows(*sequence) for sequence in sequences))


def prefill(
    model: VideoLanguageModel,
    slot: int,
    prompt: Prompt,
    kept: torch.Tensor | None = None,
    tap: AttentionTap | None = None,
) -> torch.Tensor:
    *_, logits = model.prefill(slot, prompt, model.embed_visual(prompt), kept, tap)
    assert logits is not None
    return logits


def assert_same(models: Models, prompt: Prompt, slot: int = 0) -> None:
    """A prefill and a block after it agree."""
    assert_close(prefill(models.two, slot, prompt), prefill(models.one, slot, prompt))
    plan = step((slot, 0, IDS[:5]))
    assert_close(models.two.forward(plan), models.one.forward(plan))


@pytest.mark.parametrize(
    "tap",
    [AttentionTap(2), AttentionTap(2, "causal"), AttentionTap(2, is_alignment=True)],
    ids=["visual", "causal", "alignment"],
)
def test_scores_are_the_mean_over_the_heads_of_all_ranks(
    models: Models, prompt: Prompt, tap: AttentionTap
) -> None:
    taps = [dataclasses.replace(tap), dataclasses.replace(tap)]
    for model, tap in zip(models[:2], taps, strict=True):
        groups = model.prefill(1, prompt, model.embed_visual(prompt), None, tap)
        while tap.layer_scores is None:
            assert next(groups) is None
        groups.close()
    one, two = (tap.layer_scores for tap in taps)
    assert one is not None and two is not None
    assert one.shape == (1 if tap.is_alignment else 2, prompt.visual_indices.shape[0])
    torch.testing.assert_close(two, one, atol=1e-6, rtol=1e-4)


def test_a_rank_holds_the_cache_of_its_own_heads_alone(models: Models) -> None:
    whole, part = models.one, cast(Any, models.two)._model
    assert part._cache.shape.num_kv_heads * 2 == cast(Any, whole)._cache.shape.num_kv_heads


def test_a_prefill_left_between_two_layer_groups_keeps_the_ranks_in_step(
    models: Models, prompt: Prompt
) -> None:
    left = models.two.prefill(0, prompt, models.two.embed_visual(prompt), None)
    assert next(left) is None
    assert_same(models, prompt, slot=1)  # in between
    assert next(left) is None
    left.close()

    assert_same(models, prompt)


def test_what_does_not_fit_is_refused_by_all_ranks_and_leaves_them_in_step(
    models: Models, prompt: Prompt
) -> None:
    too_long = prepare(models.one, user("what is in the thing? " * 12))
    oversized = dataclasses.replace(
        too_long,
        input_ids=too_long.input_ids.repeat(8),
        positions=too_long.positions.repeat(1, 8),
    )
    with pytest.raises(ContextLengthError):
        prefill(models.two, 0, oversized)
    prefill(models.two, 0, prompt)
    with pytest.raises(ContextLengthError):
        models.two.forward(step((0, 500, IDS)))

    assert_same(models, prompt)


async def test_services_output_equals_one_ranks_with_and_without_a_draft(models: Models) -> None:
    decoder = NoiseDecoder()
    greedy = toy_request(
        pruning=Pruning(PruningStrategy.HOLISTIC, 0.5), max_tokens=32, end_token_ids=()
    )
    formed = dataclasses.replace(
        greedy,
        sampling=dataclasses.replace(SAMPLED, grammar=grammar_from("regex", "[a-z ]{20,30}")),
        end_token_ids=models.one.info.end_token_ids,
    )
    requests = [greedy, dataclasses.replace(greedy, sampling=SAMPLED), formed]
    expected = await alone(models.one, requests)
    async with (
        serving_target(models.two, decoder) as (service, two),
        serving_draft(models.draft, decoder) as (_, draft),
    ):
        async with two.verify(greedy):
            pass  # left at once: whatever its prefill did, the ranks stay in step
        for request, answer in zip(requests, expected, strict=True):
            assert_equal(await target_only(two, request), answer)
            for policy in ("serial", "vpsd"):
                drafted = await relay(draft, two, request, policy)
                assert drafted.token_ids == answer.token_ids, policy
                assert drafted.blocks
        # Two for three slots: a draft has no queue, and its last slot may not be free yet.
        together = await asyncio.gather(*(relay(draft, two, r, "vpsd") for r in requests[1:]))
        assert [a.token_ids for a in together] == [a.token_ids for a in expected[1:]]
        await until_free(service)


async def test_ranks_take_over_the_same_rows_of_a_slot(models: Models) -> None:
    requests = [
        toy_request(text, pruning=pruning, max_tokens=16, end_token_ids=())
        for text in ("what is in the thing?", "who is in the hat?", "what is in the thing?")
        for pruning in (Pruning(PruningStrategy.NONE), Pruning(PruningStrategy.ATTENTION, 0.5))
    ]
    expected = await alone(models.one, requests)
    async with serving_target(models.two, NoiseDecoder()) as (service, two):
        for request, answer in zip(requests, expected, strict=True):
            async with two.verify(request) as stream:
                await anext(aiter(stream), None)  # left in its prefill, or soon
            assert_equal(await target_only(two, request), answer)
        await until_free(service)
        assert backend_of(service).engine.counters.num_prefix_hits >= len(requests) // 2
        assert backend_of(service).engine.counters.num_failed == 0


async def test_ranks_copy_the_same_rows_of_a_running_sequence(models: Models) -> None:
    request = toy_request(pruning=Pruning(PruningStrategy.NONE), max_tokens=16, end_token_ids=())
    (expected,) = await alone(models.one, [request])
    async with serving_target(models.two, NoiseDecoder()) as (service, two):
        answers = await asyncio.gather(*(target_only(two, request) for _ in range(2)))
        assert [answer.token_ids for answer in answers] == [expected.token_ids] * 2
        reused = sorted(answer.verdicts[0].timing.context_length for answer in answers)
        assert reused[0] == 0 < reused[1]
        assert backend_of(service).engine.counters.num_failed == 0
