"""Prompts of LLaVA-OneVision: what is prunable, where it stands, what the question is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.errors import InvalidRequestError
from hippo.models.families.llava_onevision import LlavaPromptBuilder
from hippo.models.interface.base import DecodedMedia, Prompt
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.types import ChatMessage, FramePlan
from tests.support.models.llava import ORDERED_TEMPLATE, llava_processor
from tests.support.models.reference import (
    Reference,
    assert_close,
    clip,
    image,
    normalised,
    prepare,
    user,
)


@pytest.fixture(scope="module")
def processor() -> Any:
    return llava_processor()


@pytest.fixture(scope="module")
def ordered() -> Any:
    """A processor whose template keeps the order of a turn's parts."""
    return llava_processor(ORDERED_TEMPLATE)


def build(
    processor: Any,
    messages: Sequence[ChatMessage],
    *media: DecodedMedia,
    plan: FramePlan | None = None,
) -> Prompt:
    return LlavaPromptBuilder(processor, max_context_length=4096).build_prompt(
        messages, media, plan or FramePlan()
    )


def pixels_of(prompt: Prompt) -> list[torch.Tensor]:
    return [item.pixels for item in prompt.items if item.pixels is not None]


def test_prunable_tokens_are_a_videos_grid_without_its_newline(processor: Any) -> None:
    prompt = build(processor, user(0, "what?"), clip(num_frames=4))
    is_video = prompt.input_ids == processor.video_token_id
    assert int(is_video.sum()) == 4 * 9 + 1
    assert prompt.visual_grids == ((4, 3, 3),)
    assert prompt.visual_indices.tolist() == is_video.nonzero()[:36, 0].tolist()
    assert prompt.other_indices.tolist() == is_video.nonzero()[36:, 0].tolist()
    assert pixels_of(prompt)[0].shape == (4, 3, 38, 38)


def test_the_hubs_sizes_give_14_by_14_tokens_a_frame() -> None:
    processor = llava_processor(image_size=384, patch_size=14)
    prompt = build(processor, user(0, "what?"), clip(num_frames=3, size=60))
    assert processor.num_image_tokens == 729
    assert prompt.visual_grids == ((3, 14, 14),)
    assert prompt.visual_indices.shape == (3 * 196,)
    assert pixels_of(prompt)[0].shape == (3, 3, 384, 384)


def test_positions_are_the_places_on_one_axis(processor: Any) -> None:
    prompt = build(processor, user(0, "what?"), clip())
    assert torch.equal(prompt.positions, torch.arange(prompt.length)[None])
    assert prompt.next_position == prompt.length


def test_visual_features_are_the_grid_tokens_then_images_then_newlines(
    llava_checkpoint: Path,
) -> None:
    reference = Reference(llava_checkpoint)
    model = load_model(LoadPlan(str(llava_checkpoint), dtype="float32", max_context_length=512))
    prompt = prepare(model, user(0, 1, "what?", 2), clip(), clip(num_frames=2, seed=1), image())
    features = model.embed_visual(prompt)
    assert features is not None
    assert features.shape == (54 + 18 + len(prompt.other_indices), 64)
    newline = reference.model.model.image_newline.detach()
    assert torch.equal(features[-2:], newline.expand(2, -1))
    with torch.no_grad():
        first, second = (
            reference.model.model.get_video_features(
                normalised(reference.processor.video_processor, one)[None], return_dict=True
            ).pooler_output[0]
            for one in pixels_of(prompt)[:2]
        )
    assert_close(features[:72], torch.cat((first[:-1], second[:-1])))
    assert model.embed_visual(prepare(model, user("only text"))) is None


def test_adjacent_videos_keep_a_newline_each(ordered: Any) -> None:
    clips = clip(num_frames=2), clip(num_frames=5, seed=1), clip(num_frames=1, seed=2)
    prompt = build(ordered, user(0, 1, "what?", 2), *clips)
    assert prompt.visual_grids == ((2, 3, 3), (5, 3, 3), (1, 3, 3))
    first = int(prompt.visual_indices[0])
    assert prompt.other_indices[:2].tolist() == [first + 18, first + 18 + 1 + 45]
    places = torch.cat((prompt.visual_indices, prompt.other_indices)).sort().values
    is_video = prompt.input_ids == ordered.video_token_id
    assert torch.equal(places, is_video.nonzero()[:, 0])
    assert [pixels.shape[0] for pixels in pixels_of(prompt)] == [2, 5, 1]


def test_a_lone_image_is_cut_into_tiles_and_several_are_not(processor: Any) -> None:
    lone = build(processor, user(0, "what?"), image(height=38, width=76))
    # the whole image, then two tiles side by side with a newline a row
    assert lone.other_indices.shape == (25 + 5 * (10 + 1),)
    assert pixels_of(lone)[0].shape == (3, 3, 38, 38)
    several = build(processor, user(0, 1, "what?"), image(height=38, width=76), image())
    assert several.other_indices.shape == (2 * (25 + 1),)
    assert [pixels.shape[0] for pixels in pixels_of(several)] == [1, 1]
    assert several.visual_indices.shape == (0,) and several.visual_grids == ()


@pytest.mark.parametrize("parts", [(0, "what is it?"), ("what is it?", 0)])
def test_the_hubs_template_puts_the_question_last_whatever_the_order(
    processor: Any, parts: tuple[str | int, ...]
) -> None:
    prompt = build(processor, user(*parts), clip())
    assert processor.tokenizer.decode(prompt.input_ids[prompt.question_indices]) == "what is it?"
    assert int(prompt.question_indices[0]) > int(prompt.visual_indices[-1])


def test_text_alone_asks_about_no_video(processor: Any) -> None:
    prompt = build(processor, user("hello"))
    assert prompt.question_indices.shape == prompt.visual_indices.shape == (0,)
    assert prompt.items == () and prompt.visual_grids == ()
    assert prompt.other_indices.shape == (0,)


def test_a_cap_on_pixels_below_the_frames_one_size_is_refused(processor: Any) -> None:
    build(processor, user(0, "what?"), clip(), plan=FramePlan(max_pixels=38 * 38))
    with pytest.raises(InvalidRequestError, match=r"every frame at 38 x 38 pixels.*cannot be 1443"):
        build(processor, user(0, "what?"), clip(), plan=FramePlan(max_pixels=38 * 38 - 1))


def test_a_template_that_leaves_media_out_is_reported() -> None:
    deaf = llava_processor("{% for message in messages %}{{ message['role'] }}{% endfor %}")
    with pytest.raises(InvalidRequestError, match="writes 0 media items for the 1"):
        build(deaf, user(0, "what?"), clip())
