"""Prompts made without transformers' processor are those that it makes, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hippo.errors import MediaError
from hippo.models.families.pixels import PixelScale
from hippo.models.families.qwen_prompt import QwenPromptBuilder, TimedPromptBuilder
from hippo.models.interface.base import DecodedMedia
from hippo.models.prompts.builder import resized
from hippo.models.prompts.messages import media_in_order, render
from hippo.types import ChatMessage, FramePlan, MediaKind, TextPart
from tests.support.models.reference import Reference, image, user


def builder(reference: Reference) -> QwenPromptBuilder:
    return QwenPromptBuilder(
        reference.processor, reference.model.model.get_rope_index, max_context_length=4096
    )


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
        (user(0, "a picture,", 1, "a clip"), [image(), video(4, 56, 56)], 0),
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
    ids=[
        "as it is",
        "resized",
        "odd frames",
        "enlarged",
        "capped",
        "two",
        "image",
        "text",
        "turns",
    ],
)
def test_a_prompt_is_what_the_processor_makes_of_it(
    reference: Reference, messages: list[ChatMessage], media: list[DecodedMedia], max_pixels: int
) -> None:
    plan, prompts = FramePlan(max_pixels=max_pixels), builder(reference)
    prompt = prompts.build_prompt(messages, media, plan)
    resized_media = [resized(item, plan, prompts.frame_limits) for item in media]
    kinds: dict[MediaKind, list[torch.Tensor]] = {kind: [] for kind in MediaKind}
    for item in media_in_order(messages, resized_media):
        kinds[item.kind].append(item.frames.permute(0, 3, 1, 2))
    arguments: dict[str, Any] = {}
    if kinds[MediaKind.VIDEO]:
        arguments["videos"] = kinds[MediaKind.VIDEO]
        metadata = [
            {"total_num_frames": len(each), "fps": 3.0, "frames_indices": list(range(len(each)))}
            for each in kinds[MediaKind.VIDEO]
        ]
        arguments["videos_kwargs"] = {
            "video_metadata": metadata,
            "do_sample_frames": False,
            "do_resize": False,
        }
    if kinds[MediaKind.IMAGE]:
        arguments["images"] = [each[0] for each in kinds[MediaKind.IMAGE]]
        arguments["images_kwargs"] = {"do_resize": False}
    processor = reference.processor
    rendered = render(processor, messages, media)
    expected = processor(text=[rendered], return_tensors="pt", **arguments)
    assert prompt.input_ids.tolist() == expected["input_ids"][0].tolist()
    names = {
        MediaKind.VIDEO: ("pixel_values_videos", "video"),
        MediaKind.IMAGE: ("pixel_values", "image"),
    }
    for kind, (pixels_name, name) in names.items():
        items = [item for item in prompt.items if item.kind is kind]
        if not items:
            continue
        own = processor.video_processor if kind is MediaKind.VIDEO else processor.image_processor
        pixels = torch.cat([item.pixels for item in items if item.pixels is not None])
        assert torch.equal(PixelScale(own).normalise(pixels), expected[pixels_name])
        assert [list(item.grid) for item in items] == expected[f"{name}_grid_thw"].tolist()
    if media:
        positions, _ = reference.model.model.get_rope_index(
            **{
                name: expected.get(name)
                for name in ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
            },
            second_per_grid_ts=expected.get("second_per_grid_ts"),
        )
        assert torch.equal(prompt.positions, positions[:, 0])


def test_items_are_told_apart_by_their_pixels_and_shape(reference: Reference) -> None:
    prompts = builder(reference)
    clips = [video(4, 56, 84), video(4, 84, 56), video(4, 56, 84, seed=1), video(4, 56, 84)]
    digests = [
        prompts.build_prompt(user(0, "what?"), [clip], FramePlan()).items[0].digest
        for clip in clips
    ]
    assert len(set(digests)) == 3
    assert digests[3] == digests[0]


def test_a_video_beside_an_image_is_the_one_that_it_is_alone(reference: Reference) -> None:
    prompts = builder(reference)
    clip, plan = video(4, 61, 75), FramePlan(max_pixels=6000)
    alone = prompts.build_prompt(user(0, "what?"), [clip], plan)
    beside = prompts.build_prompt(user(0, 1, "what?"), [clip, image()], plan)
    assert alone.items[0].digest == beside.items[0].digest
    first, second = alone.items[0].pixels, beside.items[0].pixels
    assert first is not None and second is not None and torch.equal(first, second)


def test_a_prompt_says_what_the_model_sees_of_each_item(reference: Reference) -> None:
    media = [image(), video(4, 61, 75), video(6, 84, 140, seed=1)]
    prompt = builder(reference).build_prompt(user(2, 1, 0, "what?"), media, FramePlan())
    first, *videos = prompt.media
    assert first.kind is MediaKind.IMAGE and first.num_frames == 1
    assert first.num_tokens == first.width * first.height // 28**2
    assert first.visual_grid == first.frame_seconds == ()
    assert [(each.num_frames, each.width, each.height) for each in videos] == [
        (4, 84, 56),
        (6, 140, 84),
    ]
    assert [each.visual_grid for each in videos] == [(2, 2, 3), (3, 3, 5)]
    assert [each.num_tokens for each in videos] == [12, 45]
    assert [each.frame_seconds for each in videos] == [
        tuple(item.frame_seconds) for item in media[1:]
    ]
    assert sum(use.num_tokens for use in videos) == prompt.visual_indices.shape[0]


def test_frames_that_the_processor_refuses_are_refused(reference: Reference) -> None:
    with pytest.raises(MediaError, match="at most 200 times the other"):
        builder(reference).build_prompt(user(0, "what?"), [video(2, 4, 900)], FramePlan())


@pytest.mark.parametrize(
    ("change", "decides_ids"),
    [
        ({"fps": 1.0}, True),
        ({"num_frames": 8}, True),
        ({"min_frames": 6}, True),
        ({"max_video_tokens": 5000}, True),
        ({"grid_text_tokens": 3}, True),
        ({"video_pixels": (3136, 10**7)}, True),
        ({"image_pixels": (3136, 10**7)}, False),
        ({"resample": 2}, False),
    ],
)
def test_the_hash_of_a_pairs_videos_is_of_all_limits_that_decide_their_ids(
    reference: Reference, change: dict[str, Any], decides_ids: bool
) -> None:
    """Limits which the hash's own example, a small clip, is far from count too."""
    here, there = builder(reference), builder(reference)
    assert here.video_hash() == there.video_hash()
    there.frame_limits = replace(here.frame_limits, **change)
    assert (here.video_hash() != there.video_hash()) is decides_ids


def test_frames_of_a_part_of_a_clip_are_marked_with_its_times() -> None:
    class Marks(TimedPromptBuilder):
        def __init__(self) -> None:
            self._processor = SimpleNamespace(vision_start_token="<s>", vision_end_token="</s>")

    part = replace(video(4, 56, 84), frame_seconds=(10.0, 11.0, 13.0, 14.0))
    pieces = ("<10.5 seconds><s>", 6, "</s><13.5 seconds><s>", 6, "</s>")
    assert Marks().video_pieces(part, (2, 2, 3)) == pieces
