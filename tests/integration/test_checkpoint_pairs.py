"""Both services with small random checkpoints of every family in fp32: the output is the target's
own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from hippo.types import (
    ChatMessage,
    ContentPart,
    Media,
    MediaKind,
    MediaPart,
    Pruning,
    PruningStrategy,
    SamplingParams,
    TextPart,
)
from tests.support.families import ALL_FAMILIES, write_family
from tests.support.pairs import NoiseDecoder, Pair, load
from tests.support.services import (
    POLICIES,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.3)
SAMPLINGS = pytest.mark.parametrize(
    "sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"]
)
MEDIA = (
    Media(MediaKind.VIDEO, b"sixsix"),
    Media(MediaKind.VIDEO, b"a longer one"),
    Media(MediaKind.IMAGE, b"one"),
)
VIDEO_FIRST = (MediaPart(0), TextPart("what is in the thing?"))
QUESTION_FIRST = (TextPart("what is in the thing?"), MediaPart(0))
SEVERAL = (MediaPart(0), TextPart("or"), MediaPart(2), MediaPart(1), TextPart("which?"))


@pytest.fixture(scope="module", params=ALL_FAMILIES)
def family_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A target and a noisy draft with a larger vocabulary size, computing with one thread."""
    folder, threads = tmp_path_factory.mktemp("pair"), torch.get_num_threads()
    torch.set_num_threads(1)
    yield Pair(
        load(write_family(folder / "target", request.param)),
        load(write_family(folder / "draft", request.param, noise=0.02, vocab_size=320)),
    )
    torch.set_num_threads(threads)


@SAMPLINGS
async def test_every_policy_gives_the_target_only_output(
    family_pair: Pair, sampling: SamplingParams
) -> None:
    request = toy_request(
        sampling=sampling,
        pruning=Pruning(PruningStrategy.NONE),
        max_tokens=40,
        end_token_ids=(),
    )
    async with (
        serving_target(family_pair.target, NoiseDecoder()) as (_, target),
        serving_draft(family_pair.draft, NoiseDecoder()) as (_, draft),
    ):
        alone = await target_only(target, request)
        assert len(alone.token_ids) == 40
        for policy in POLICIES:
            answer = await relay(draft, target, request, policy)
            assert answer.token_ids == alone.token_ids, policy
            if policy == "vpsd":  # a draft that sees all tokens is often right
                assert sum(verdict.num_accepted_tokens for verdict in answer.verdicts) > 8


@pytest.mark.parametrize(
    ("content", "sampling"),
    [(VIDEO_FIRST, SAMPLED), (QUESTION_FIRST, SamplingParams()), (SEVERAL, SAMPLED)],
    ids=["video", "question", "several"],
)
async def test_every_strategy_gives_the_target_only_output(
    family_pair: Pair, content: tuple[ContentPart, ...], sampling: SamplingParams
) -> None:
    num_media = sum(isinstance(part, MediaPart) for part in content)
    request = toy_request(
        messages=(ChatMessage("user", content),),
        media=MEDIA[:num_media],
        sampling=sampling,
        max_tokens=24,
        end_token_ids=(),
    )
    kept: dict[PruningStrategy, tuple[int, ...]] = {}
    async with (
        serving_target(family_pair.target, NoiseDecoder()) as (_, target),
        serving_draft(family_pair.draft, NoiseDecoder()) as (_, draft),
    ):
        alone = await target_only(target, request)
        assert len(alone.token_ids) == 24
        for strategy in PruningStrategy:
            pruned = dataclasses.replace(request, pruning=Pruning(strategy, 0.9, seed=3))
            answer = await relay(draft, target, pruned, "vpsd")
            assert answer.token_ids == alone.token_ids, strategy
            assert answer.blocks, "the draft took no part"
            assert answer.selection is not None
            kept[strategy] = answer.selection.kept_indices
            num_visual = answer.selection.num_visual_tokens
    counts = {strategy: len(indices) for strategy, indices in kept.items()}
    assert counts.pop(PruningStrategy.NONE) == num_visual > 0
    assert counts.pop(PruningStrategy.BLIND) == 0
    assert set(counts.values()) == {num_visual - int(0.9 * num_visual)}
    assert len({kept[strategy] for strategy in counts}) > 2, "strategies choose differently"
