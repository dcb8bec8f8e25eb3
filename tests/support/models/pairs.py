"""Small random checkpoints as a pair of models, and frames for them."""

import asyncio
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hippo.models.cached import CachedModel
from hippo.models.interface.base import DecodedMedia, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.types import FramePlan, Media, MediaKind, OpenRequest
from tests.support.models.reference import noise
from tests.support.running.services import (
    Answer,
    relay,
    serving_draft,
    serving_target,
    target_only,
    until_free,
)


class NoiseDecoder:
    """Frames of noise by the data instead of a decoded file; of a video as many as it has bytes."""

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        num_frames = len(media.data) if media.kind is MediaKind.VIDEO else 1
        frames = noise(num_frames, 84, 112, zlib.crc32(media.data))
        return DecodedMedia(media.kind, frames, tuple(i / 2 for i in range(num_frames)), 2.0)


class Pair(NamedTuple):
    target: VideoLanguageModel
    draft: VideoLanguageModel


def load(folder: Path, **changes: Any) -> CachedModel:
    """In float32, with two slots of 512 tokens."""
    options: dict[str, Any] = {"dtype": "float32", "num_slots": 2, "max_context_length": 512}
    model = load_model(LoadPlan(str(folder), **(options | changes)))
    assert isinstance(model, CachedModel)
    return model


async def assert_equal_to_target_only(
    models: Iterable[VideoLanguageModel],
    *requests: OpenRequest,
    policies: Sequence[str] = ("serial", "vpsd", "optimistic"),  # blocks of all kinds
    **options: Any,
) -> dict[str, list[Answer]]:
    """The answers of a target and a draft to the requests, side by side, are the target's own under
    each policy; returns them by policy. ``options`` are the target's."""
    decoder = NoiseDecoder()
    target_model, draft_model = models
    async with (
        serving_target(target_model, decoder, **options) as (_, target),
        serving_draft(draft_model, decoder) as (draft_service, draft),
    ):
        alone = [(await target_only(target, each)).token_ids for each in requests]
        for request, token_ids in zip(requests, alone, strict=True):
            assert token_ids and (request.end_token_ids or len(token_ids) == request.max_tokens)
        answers: dict[str, list[Answer]] = {}
        for policy in policies:
            asked = (relay(draft, target, each, policy) for each in requests)
            answers[policy] = await asyncio.gather(*asked)
            assert [answer.token_ids for answer in answers[policy]] == alone, policy
            await until_free(draft_service)  # a draft has no queue
    return answers
