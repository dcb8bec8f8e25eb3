"""Both services with real (small, random) checkpoints in fp32: the output is the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hippo.models.base import DecodedMedia, VideoLanguageModel
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import FramePlan, Media, Pruning, PruningStrategy, SamplingParams
from tests.support.services import (
    POLICIES,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.3)


class NoiseDecoder:
    """Frames of seeded noise instead of a decoded file."""

    async def decode(self, media: Media, plan: FramePlan) -> DecodedMedia:
        generator = torch.Generator().manual_seed(len(media.data))
        frames = torch.randint(0, 256, (4, 84, 112, 3), generator=generator, dtype=torch.uint8)
        return DecodedMedia(media.kind, frames, (0.0, 0.5, 1.0, 1.5), 2.0)


class Pair(NamedTuple):
    draft: DraftClient
    target: TargetClient


def _load(folder: Path) -> VideoLanguageModel:
    return load_model(
        LoadPlan(str(folder), device="cpu", dtype="float32", num_slots=2, max_context_length=256)
    )


@pytest.fixture
async def pair(draft_checkpoint: Path, target_checkpoint: Path) -> AsyncIterator[Pair]:
    decoder = NoiseDecoder()
    async with (
        serving_target(_load(target_checkpoint), decoder) as (_, target),
        serving_draft(_load(draft_checkpoint), decoder) as (_, draft),
    ):
        yield Pair(draft, target)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_every_policy_gives_the_target_only_output(
    pair: Pair, sampling: SamplingParams
) -> None:
    request = toy_request(
        sampling=sampling,
        pruning=Pruning(PruningStrategy.UNIFORM, 0.5),
        max_tokens=40,
        end_token_ids=(),
    )
    alone = await target_only(pair.target, request)

    for policy in POLICIES:
        answer = await relay(pair.draft, pair.target, request, policy)
        assert answer.token_ids == alone.token_ids, policy

    assert len(alone.token_ids) == 40


async def test_two_sequences_at_once_equal_each_alone(pair: Pair) -> None:
    requests = [
        toy_request("a short one", sampling=SAMPLED, max_tokens=30, end_token_ids=()),
        toy_request("and a longer question", max_tokens=40, end_token_ids=()),
    ]
    alone = [(await target_only(pair.target, request)).token_ids for request in requests]

    together = await asyncio.gather(
        *(relay(pair.draft, pair.target, request, "vpsd") for request in requests)
    )

    assert [answer.token_ids for answer in together] == alone
