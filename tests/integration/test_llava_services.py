"""Both services with a small LLaVA-OneVision pair in fp32: the output is the target's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hippo.models.base import DecodedMedia
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import (
    ChatMessage,
    FramePlan,
    Media,
    MediaKind,
    MediaPart,
    OpenRequest,
    Pruning,
    PruningStrategy,
    SamplingParams,
    TextPart,
)
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
    """Frames of seeded noise instead of a decoded file; as many as the data's length says."""

    async def decode(self, media: Media, plan: FramePlan) -> DecodedMedia:
        generator = torch.Generator().manual_seed(len(media.data))
        shape = (len(media.data) if media.kind is MediaKind.VIDEO else 1, 60, 80, 3)
        frames = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return DecodedMedia(media.kind, frames, tuple(range(shape[0])), 1.0)


class Pair(NamedTuple):
    draft: DraftClient
    target: TargetClient


@pytest.fixture
async def pair(llava_draft_checkpoint: Path, llava_checkpoint: Path) -> AsyncIterator[Pair]:
    draft, target = (
        load_model(LoadPlan(str(folder), dtype="float32", num_slots=2, max_context_length=512))
        for folder in (llava_draft_checkpoint, llava_checkpoint)
    )
    decoder = NoiseDecoder()
    async with (
        serving_target(target, decoder) as (_, target_client),
        serving_draft(draft, decoder) as (_, draft_client),
    ):
        yield Pair(draft_client, target_client)


def video_request(**changes: Any) -> OpenRequest:
    """A question about a video of four frames: 36 visual tokens."""
    values: dict[str, Any] = {
        "media": (Media(MediaKind.VIDEO, b"four"),),
        "max_tokens": 40,
        "end_token_ids": (),
    }
    return toy_request(**(values | changes))


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", PruningStrategy)
async def test_every_strategy_gives_the_target_only_output(
    pair: Pair, strategy: PruningStrategy, sampling: SamplingParams
) -> None:
    request = video_request(sampling=sampling, pruning=Pruning(strategy, 0.75, seed=3))
    alone = await target_only(pair.target, request)
    answer = await relay(pair.draft, pair.target, request, "vpsd")
    assert answer.token_ids == alone.token_ids
    assert len(alone.token_ids) == 40
    assert answer.blocks, "the draft took no part"
    kept = {PruningStrategy.NONE: 36, PruningStrategy.BLIND: 0}.get(strategy, 9)
    assert answer.selection is not None
    assert answer.selection.num_visual_tokens == 36
    assert len(answer.selection.kept_indices) == kept


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_gives_the_target_only_output(pair: Pair, policy: str) -> None:
    request = video_request(pruning=Pruning(PruningStrategy.HOLISTIC, 0.5))
    alone = await target_only(pair.target, request)
    answer = await relay(pair.draft, pair.target, request, policy)
    assert answer.token_ids == alone.token_ids


async def test_several_videos_and_an_image_give_the_target_only_output(pair: Pair) -> None:
    parts = (MediaPart(0), TextPart("and"), MediaPart(1), MediaPart(2), TextPart("what?"))
    request = video_request(
        messages=(ChatMessage("user", parts),),
        media=(
            Media(MediaKind.VIDEO, b"four"),
            Media(MediaKind.IMAGE, b"one"),
            Media(MediaKind.VIDEO, b"a longer one"),
        ),
        pruning=Pruning(PruningStrategy.HOLISTIC, 0.9),
    )
    alone = await target_only(pair.target, request)
    answer = await relay(pair.draft, pair.target, request, "vpsd")
    assert answer.token_ids == alone.token_ids
    assert answer.selection is not None
    assert answer.selection.num_visual_tokens == (4 + 12) * 9


async def test_a_draft_that_sees_all_tokens_is_often_right(pair: Pair) -> None:
    request = video_request(pruning=Pruning(PruningStrategy.NONE))
    answer = await relay(pair.draft, pair.target, request, "vpsd")
    assert sum(verdict.num_accepted_tokens for verdict in answer.verdicts) > 8
