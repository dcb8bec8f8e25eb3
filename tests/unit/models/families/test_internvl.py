"""InternVL: numbered frames, tiles of images, the places of tokens, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.media.resizing import fit_frames
from hippo.models.families.internvl import InternVLPromptBuilder
from hippo.models.families.pixels import PixelScale
from hippo.models.interface.base import DecodedMedia, Prompt, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.types import ChatMessage, FramePlan, MediaKind
from tests.support.models.internvl import internvl_processor, write_internvl_checkpoint
from tests.support.models.reference import (
    Reference,
    arranged,
    assert_close,
    clip,
    image,
    prefill,
    prepare,
    user,
)


@pytest.fixture(scope="module")
def reference(internvl_checkpoint: Path) -> Reference:
    return Reference(internvl_checkpoint)


@pytest.fixture(scope="module")
def internvl(internvl_checkpoint: Path) -> VideoLanguageModel:
    return load_model(LoadPlan(str(internvl_checkpoint), dtype="float32", max_context_length=512))


def build(processor: Any, messages: list[ChatMessage], *media: DecodedMedia) -> Prompt:
    builder = InternVLPromptBuilder(processor, max_context_length=40960)
    return builder.build_prompt(messages, media, FramePlan())


def test_each_frame_is_a_grid_behind_its_number() -> None:
    processor = internvl_processor()
    prompt = build(processor, user(0, "what?"), clip(num_frames=3))
    shown = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>"
    lines = "\n".join(f"Frame{number}: {shown}" for number in (1, 2, 3))
    text = processor.tokenizer.decode(prompt.input_ids)
    assert text == f"<|im_start|>user\n{lines}\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.visual_grids == ((3, 2, 2),)
    is_shown = prompt.input_ids == processor.image_token_id
    assert torch.equal(prompt.visual_indices, is_shown.nonzero()[:, 0])
    assert prompt.other_indices.shape == (0,)
    assert processor.tokenizer.decode(prompt.input_ids[prompt.question_indices]) == "what?"
    assert torch.equal(prompt.positions, torch.arange(prompt.length)[None])


def test_the_hubs_sizes_give_16_by_16_tokens_a_frame_and_tiles_with_a_small_copy() -> None:
    processor = internvl_processor(image_size=448, patch_size=14, max_patches=12)
    prompt = build(
        processor, user(0, 1, "what?"), clip(num_frames=2), image(height=500, width=1000)
    )
    assert prompt.visual_grids == ((2, 16, 16),)
    video, picture = (item.pixels for item in prompt.items)
    assert video is not None and video.shape == (2, 3, 448, 448)
    assert picture is not None and picture.shape == (3, 3, 448, 448)  # 2 x 1 tiles
    assert prompt.other_indices.shape == (3 * 256,)


@pytest.mark.parametrize(
    "turn",
    [
        (clip(), "and", clip(num_frames=6, seed=1)),
        (image(), "and", image(height=30, width=90, seed=1), "and", image(height=28, width=28)),
        (image(), clip(size=60), "and", image(height=90, width=30, seed=1)),
    ],
)
def test_ids_and_pixels_are_the_processors_to_the_last_bit(
    internvl: VideoLanguageModel, reference: Reference, turn: tuple[str | DecodedMedia, ...]
) -> None:
    content, parts, media = arranged(turn)
    inputs = reference.inputs(content, media)
    prompt = prepare(internvl, user(*parts), *media)
    assert prompt.input_ids.tolist() == inputs["input_ids"][0].tolist()
    written = sorted(prompt.items, key=lambda item: int(item.places[0]))
    scale = PixelScale(reference.processor.video_processor)
    pixels = [scale.normalise(item.pixels) for item in written if item.pixels is not None]
    assert torch.equal(torch.cat(pixels), inputs["pixel_values"])


@pytest.mark.parametrize("place", range(4))
def test_a_frames_tokens_are_ordered_by_row_and_column(
    internvl: VideoLanguageModel, place: int
) -> None:
    plain = torch.full((1, 28, 28, 3), 128, dtype=torch.uint8)
    marked = plain.clone()
    top, left = place // 2 * 14, place % 2 * 14
    marked[:, top : top + 14, left : left + 14] = 255
    features = [
        internvl.embed_visual(
            prepare(internvl, user(0, "?"), DecodedMedia(MediaKind.VIDEO, frames, (0.0,), 1.0))
        )
        for frames in (plain, marked)
    ]
    assert features[0] is not None and features[1] is not None
    change = (features[1] - features[0]).norm(dim=1)
    assert int(change.argmax()) == place
    assert change.max() > 2 * change.sort().values[-2]


def test_a_tower_takes_a_few_pictures_at_once(
    internvl_checkpoint: Path, internvl: VideoLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hippo.models.families.internvl.VISION_PATCHES", 2 * 16 + 15)
    model = load_model(LoadPlan(str(internvl_checkpoint), dtype="float32", max_context_length=512))
    prompt = prepare(model, user(0, 1, "?"), clip(num_frames=5), image(height=30, width=120))
    assert [len(item.pixels) for item in prompt.items if item.pixels is not None] == [5, 5]
    assert len(list(model.embed_pieces(prompt))) == 3 + 3
    parts, whole = model.embed_visual(prompt), internvl.embed_visual(prompt)
    assert parts is not None and whole is not None
    torch.testing.assert_close(parts, whole)


def test_a_language_model_of_internvl3_gives_transformers_own_logits(tmp_path: Path) -> None:
    folder = write_internvl_checkpoint(tmp_path / "tiny", language="qwen2")
    model = load_model(LoadPlan(str(folder), dtype="float32", max_context_length=512))
    prompt = prepare(model, user(0, "what?"), clip())
    kept = torch.tensor([1, 5, 6])
    assert_close(prefill(model, 0, prompt, kept), Reference(folder).recompute(prompt, kept, ())[0])


def test_as_many_frames_as_fit_with_their_text(internvl: VideoLanguageModel) -> None:
    room = 400
    limits = internvl.frame_limits
    num_frames = fit_frames(300, 84, 84, FramePlan(max_visual_tokens=room), limits)
    media = clip(num_frames=num_frames)
    alone = prepare(internvl, user("what?")).length
    assert room // 4 > num_frames > 10
    assert prepare(internvl, user(0, "what?"), media).length <= alone + room
