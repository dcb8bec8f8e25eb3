"""Prompts made without transformers' processor are those that it makes, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hippo.errors import MediaError
from hippo.models.base import DecodedMedia
from hippo.models.qwen_pixels import VideoPatches, fast_patches
from hippo.models.qwen_prompt import QwenPromptBuilder
from hippo.types import ChatMessage, FramePlan, MediaKind, MediaUse, TextPart
from tests.support.reference import Reference, image, user


@pytest.fixture(scope="module")
def processor(reference: Reference) -> Any:
    return reference.processor


def builder(reference: Reference, *, is_fast: bool) -> QwenPromptBuilder:
    """``is_fast`` False leaves all to the processor, as for one that is not known."""
    made = QwenPromptBuilder(
        reference.processor, reference.model.model.get_rope_index, max_context_length=4096
    )
    if not is_fast:
        made._patches = None
    return made


def video(num_frames: int, height: int, width: int, *, seed: int = 0) -> DecodedMedia:
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(
        0, 256, (num_frames, height, width, 3), generator=generator, dtype=torch.uint8
    )
    seconds = tuple(index / 3 for index in range(num_frames))
    return DecodedMedia(MediaKind.VIDEO, frames, seconds, 3.0)


@pytest.mark.parametrize(
    ("messages", "media", "max_pixels"),
    [
        (user(0, "what is in it?"), [video(4, 56, 84)], 0),
        (user("what is in it?", 0), [video(4, 61, 75)], 0),
        (user(0, "who is there?"), [video(5, 133, 150)], 0),
        (user(0, "small?"), [video(2, 20, 31)], 0),
        (user(0, "fewer pixels?"), [video(6, 140, 196)], 6000),
        (user(0, "one,", 1, "two"), [video(4, 56, 56), video(3, 84, 70, seed=1)], 0),
        (user("no video at all?"), [], 0),
        (
            [
                ChatMessage("system", (TextPart("be brief"),)),
                *user(0, "first  question "),
                ChatMessage("assistant", (TextPart("an answer\n"),)),
                *user("second question?"),
            ],
            [video(4, 56, 84)],
            0,
        ),
    ],
    ids=["as it is", "resized", "odd frames", "enlarged", "capped", "two", "text", "turns"],
)
def test_a_prompt_is_what_the_processor_makes_of_it(
    reference: Reference, messages: list[ChatMessage], media: list[DecodedMedia], max_pixels: int
) -> None:
    plan = FramePlan(max_pixels=max_pixels)
    fast = builder(reference, is_fast=True).build_prompt(messages, media, plan)
    expected = builder(reference, is_fast=False).build_prompt(messages, media, plan)
    for name in ("input_ids", "positions", "visual_indices", "question_indices"):
        found, wanted = getattr(fast, name), getattr(expected, name)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted), name
    assert (fast.next_position, fast.prompt_hash) == (expected.next_position, expected.prompt_hash)
    assert fast.visual_grids == expected.visual_grids
    assert fast.extras.keys() == expected.extras.keys()
    for name, wanted in expected.extras.items():
        assert fast.extras[name].dtype == wanted.dtype
        assert torch.equal(fast.extras[name], wanted), name
    for mine, theirs in zip(fast.items, expected.items, strict=True):
        assert torch.equal(mine.places, theirs.places)


def test_items_are_told_apart_by_their_pixels_and_shape(reference: Reference) -> None:
    prompts = builder(reference, is_fast=True)
    clips = [video(4, 56, 84), video(4, 84, 56), video(4, 56, 84, seed=1), video(4, 56, 84)]
    digests = [
        prompts.build_prompt(user(0, "what?"), [clip], FramePlan()).items[0].digest
        for clip in clips
    ]
    assert len(set(digests)) == 3
    assert digests[3] == digests[0]


def test_a_video_beside_an_image_is_the_one_that_it_is_alone(reference: Reference) -> None:
    prompts = builder(reference, is_fast=True)
    clip, plan = video(4, 61, 75), FramePlan(max_pixels=6000)
    alone = prompts.build_prompt(user(0, "what?"), [clip], plan)
    beside = prompts.build_prompt(user(0, 1, "what?"), [clip, image()], plan)
    assert alone.items[0].digest == beside.items[0].digest
    assert torch.equal(alone.extras["pixel_values_videos"], beside.extras["pixel_values_videos"])


def test_a_prompt_says_what_the_model_sees_of_each_item(reference: Reference) -> None:
    media = [image(), video(4, 61, 75), video(6, 84, 140, seed=1)]
    prompt = builder(reference, is_fast=True).build_prompt(
        user(2, 1, 0, "what?"), media, FramePlan()
    )
    first, *videos = prompt.media
    assert first.kind is MediaKind.IMAGE and first.num_frames == 1
    assert first.num_tokens == first.width * first.height // 28**2
    assert videos == [
        MediaUse(MediaKind.VIDEO, 4, 84, 56, 2 * 3 * 2),
        MediaUse(MediaKind.VIDEO, 6, 140, 84, 3 * 5 * 3),
    ]
    assert sum(use.num_tokens for use in videos) == prompt.visual_indices.shape[0]


def test_frames_that_the_processor_refuses_are_refused(reference: Reference) -> None:
    for is_fast in (True, False):
        with pytest.raises(MediaError, match="aspect ratio"):
            builder(reference, is_fast=is_fast).build_prompt(
                user(0, "what?"), [video(2, 4, 900)], FramePlan()
            )


def test_a_processor_that_does_something_else_is_not_replaced(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    video_processor = processor.video_processor
    assert VideoPatches(video_processor).matches_processor()
    monkeypatch.setattr(video_processor, "do_normalize", False)
    assert fast_patches(video_processor) is None
    monkeypatch.undo()
    ours = VideoPatches(video_processor)
    monkeypatch.setattr(video_processor, "merge_size", 1)
    assert not ours.matches_processor()
    assert fast_patches(object()) is None
