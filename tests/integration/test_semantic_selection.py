"""The kept visual tokens leave the target while its prefill runs; the output stays its own."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hippo.config import SettingsError
from hippo.errors import ModelLoadError
from hippo.models.base import DecodedMedia, VideoLanguageModel
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import (
    ChatMessage,
    FramePlan,
    Media,
    MediaKind,
    MediaPart,
    PromptInfo,
    Pruning,
    PruningStrategy,
    SamplingParams,
    Selection,
    TextPart,
    Verdict,
)
from services.target.config import TargetSettings
from tests.support.gate import Gate
from tests.support.services import (
    backend_of,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until,
    until_free,
)
from tests.support.toy_model import ToyModel

SCORED = [
    PruningStrategy.ATTENTION,
    PruningStrategy.HOLISTIC,
    PruningStrategy.SPECVLM,
    PruningStrategy.HYBRID,
]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
NUM_TOY_TOKENS = 16


@pytest.mark.parametrize("strategy", SCORED)
async def test_the_selection_is_there_while_the_later_layers_wait(
    strategy: PruningStrategy,
) -> None:
    model = ToyModel()
    async with serving_target(model, score_layers=2) as (_, client):
        model.on_piece = gate = Gate(3)
        async with client.verify(toy_request(pruning=Pruning(strategy, 0.75))) as stream:
            assert isinstance(await anext(stream), PromptInfo)
            selection = await anext(stream)
            assert gate.has_arrived.wait(10)
            assert isinstance(selection, Selection)
            assert len(selection.kept_indices) == 4
            assert list(selection.kept_indices) == sorted(set(selection.kept_indices))
            assert selection.num_visual_tokens == NUM_TOY_TOKENS
            assert selection.score_ns > 0
            gate.open()
            assert isinstance(await anext(stream), Verdict)
    assert model.tapped[-1] == 2


async def test_the_tokens_that_score_highest_are_kept() -> None:
    async with serving_target(ToyModel()) as (_, client):
        answer = await target_only(
            client, toy_request(pruning=Pruning(PruningStrategy.ATTENTION, 0.75))
        )
    assert answer.selection is not None
    assert answer.selection.kept_indices == (12, 13, 14, 15)


@pytest.mark.parametrize(
    ("pruning", "num_videos", "num_kept"),
    [
        (Pruning(PruningStrategy.UNIFORM, 0.5), 1, 8),
        (Pruning(PruningStrategy.NONE), 1, 16),
        (Pruning(PruningStrategy.HOLISTIC, 0.0), 1, 16),
        (Pruning(PruningStrategy.ATTENTION, 0.05), 1, 16),
        (Pruning(PruningStrategy.HOLISTIC, 0.9), 0, 0),
        (Pruning(PruningStrategy.SPECVLM, 0.9), 0, 0),
        (Pruning(PruningStrategy.HOLISTIC, 0.9, min_visual_tokens=17), 1, 16),
        (Pruning(PruningStrategy.UNIFORM, 0.9, min_visual_tokens=17), 1, 16),
        (Pruning(PruningStrategy.UNIFORM, 0.5, min_visual_tokens=16), 1, 8),
    ],
)
async def test_a_choice_that_needs_no_scores_is_said_before_any_device_work(
    pruning: Pruning, num_videos: int, num_kept: int
) -> None:
    model = ToyModel()
    async with serving_target(model) as (_, client):
        model.on_piece = gate = Gate()
        request = toy_request(pruning=pruning, max_tokens=2)
        if not num_videos:
            text = (ChatMessage("user", (TextPart("what?"),)),)
            request = toy_request(pruning=pruning, max_tokens=2, messages=text, media=())
        async with client.verify(request) as stream:
            assert isinstance(await anext(stream), PromptInfo)
            selection = await anext(stream)
            assert isinstance(selection, Selection)
            assert len(selection.kept_indices) == num_kept
            gate.open()
            assert all([isinstance(message, Verdict) async for message in stream])
    assert model.tapped[-1] is None


async def test_cancelling_between_the_tap_and_the_end_of_the_prefill_frees_the_slot() -> None:
    model = ToyModel()
    async with serving_target(model) as (service, client):
        model.on_piece = gate = Gate(3)
        request = toy_request(pruning=Pruning(PruningStrategy.HOLISTIC, 0.5))
        async with client.verify(request) as stream:
            assert isinstance(await anext(stream), PromptInfo)
            assert isinstance(await anext(stream), Selection)
            await until(gate.has_arrived.is_set)
        await until(lambda: service.num_streams == 0)
        gate.open()
        await until_free(service)
        assert backend_of(service).engine.counters.num_prefills == 0
        assert backend_of(service).engine.counters.num_sequences == 0


async def test_half_of_the_layers_is_tapped_unless_the_operator_says_otherwise() -> None:
    request = toy_request(pruning=Pruning(PruningStrategy.ATTENTION, 0.5), max_tokens=1)
    for given, tapped in ((None, 1), (3, 3)):
        model = ToyModel()
        async with serving_target(model, score_layers=given) as (_, client):
            answer = await target_only(client, request)
        assert model.tapped[-1] == tapped
        assert answer.selection is not None


async def test_more_layers_than_the_model_has_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="--score-layers is 4, but toy has 3"):
        async with serving_target(ToyModel(), score_layers=4):
            pass
    with pytest.raises(SettingsError, match="--score-layers is 0"):
        TargetSettings(model="toy", score_layers=0)


class NoiseDecoder:
    """Frames of seeded noise instead of a decoded file."""

    async def decode(self, media: Media, plan: FramePlan) -> DecodedMedia:
        generator = torch.Generator().manual_seed(len(media.data))
        frames = torch.randint(0, 256, (6, 84, 112, 3), generator=generator, dtype=torch.uint8)
        return DecodedMedia(media.kind, frames, tuple(i / 2 for i in range(6)), 2.0)


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


VIDEO_FIRST = (MediaPart(0), TextPart("what is in the thing?"))
QUESTION_FIRST = (TextPart("what is in the thing?"), MediaPart(0))
TWO_VIDEOS = (MediaPart(0), TextPart("or"), MediaPart(1), TextPart("which?"))


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "content", [VIDEO_FIRST, QUESTION_FIRST, TWO_VIDEOS], ids=["video", "question", "two videos"]
)
async def test_every_strategy_gives_the_target_only_output(
    pair: Pair, content: tuple[MediaPart | TextPart, ...], sampling: SamplingParams
) -> None:
    num_videos = sum(isinstance(part, MediaPart) for part in content)
    request = toy_request(
        messages=(ChatMessage("user", content),),
        media=tuple(Media(MediaKind.VIDEO, b"x" * (index + 1)) for index in range(num_videos)),
        sampling=sampling,
        max_tokens=24,
        end_token_ids=(),
    )
    alone = await target_only(pair.target, request)
    assert len(alone.token_ids) == 24

    kept: dict[PruningStrategy, tuple[int, ...]] = {}
    for strategy in PruningStrategy:
        pruned = dataclasses.replace(request, pruning=Pruning(strategy, 0.75))
        answer = await relay(pair.draft, pair.target, pruned, "vpsd")
        assert answer.token_ids == alone.token_ids, strategy
        assert answer.selection is not None
        kept[strategy] = answer.selection.kept_indices
    num_visual = 36 * num_videos
    assert {len(kept[strategy]) for strategy in SCORED} == {num_visual // 4}
    assert len({kept[strategy] for strategy in SCORED}) > 1, "strategies choose differently"
