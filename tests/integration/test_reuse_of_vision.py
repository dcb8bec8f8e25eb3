"""Both services do not look again at media that they have seen."""

from __future__ import annotations

from hippo.types import Media, MediaKind, Pruning, PruningStrategy
from tests.support.services import (
    backend_of,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)
from tests.support.toy_model import ToyModel


async def test_a_second_question_about_a_clip_skips_the_vision_tower_of_both_services() -> None:
    target, draft = ToyModel(), ToyModel(noise=0.3)
    async with (
        serving_target(target) as (target_service, target_client),
        serving_draft(draft) as (draft_service, draft_client),
    ):
        embedded = target.num_embedded, draft.num_embedded  # by the first forwards
        for text in ("who is it?", "where does it go?"):
            request = toy_request(text, pruning=Pruning(PruningStrategy.HOLISTIC, 0.5))
            await relay(draft_client, target_client, request, "vpsd")
        for service in (target_service, draft_service):
            vision = backend_of(service).engine.vision_cache
            assert (vision.num_hits, vision.num_misses) == (1, 1)
            assert vision.num_bytes == 16 * 4 * 4
    assert (target.num_embedded, draft.num_embedded) == (embedded[0] + 1, embedded[1] + 1)


async def test_another_clip_is_looked_at() -> None:
    async with serving_target(ToyModel(), prefix_cache=False) as (service, client):
        for data in (b"toy:4", b"toy:5", b"toy:4"):
            await target_only(client, toy_request(media=(Media(MediaKind.VIDEO, data),)))
        vision = backend_of(service).engine.vision_cache
        assert (vision.num_hits, vision.num_misses) == (1, 2)
