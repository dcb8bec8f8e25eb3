"""Prompts hold bytes, and what the tower's device makes of them is the processor's own float32."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.models.families.pixels import PixelScale, byte_options
from hippo.models.interface.base import DecodedMedia, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.types import MediaKind
from tests.support.models.llava import llava_processor
from tests.support.models.reference import clip, image, prepare, user

NOISE = torch.randint(
    0, 256, (5, 3, 91, 77), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
)


def _processor(name: str, reference: Any) -> Any:
    family, _, kind = name.partition(" ")
    processor = reference.processor if family == "qwen2.5-vl" else llava_processor()
    return processor.image_processor if kind == "images" else processor.video_processor


@pytest.mark.parametrize(
    "name",
    ["qwen2.5-vl videos", "qwen2.5-vl images", "llava-onevision videos", "llava-onevision images"],
)
@pytest.mark.parametrize("mean", [[0.5, 0.5, 0.5], [0.48145466, 0.4578275, 0.40821073]])
def test_normalised_bytes_are_the_processors_pixels_to_the_last_bit(
    name: str, mean: list[float], reference: Any
) -> None:
    processor = _processor(name, reference)
    options: dict[str, Any] = {"image_mean": mean, "return_tensors": "pt"}
    given: dict[str, Any]
    if name.endswith("images"):
        given, key = {"images": NOISE[:1]}, "pixel_values"
    else:
        given, key = {"videos": [NOISE], "do_sample_frames": False}, "pixel_values_videos"
    expected = processor(**given, **options)[key]
    pixels = processor(**given, **options, **byte_options(processor))[key]
    assert (pixels.dtype, expected.dtype) == (torch.uint8, torch.float32)
    was, processor.image_mean = processor.image_mean, mean
    try:
        assert torch.equal(PixelScale(processor).normalise(pixels), expected)
    finally:
        processor.image_mean = was


def test_a_processor_that_does_not_normalise_only_rescales() -> None:
    processor = llava_processor().video_processor
    processor.do_normalize = False
    assert byte_options(processor) == {}
    pixels = processor([NOISE], do_sample_frames=False, return_tensors="pt")["pixel_values_videos"]
    assert PixelScale(processor).normalise(pixels) is pixels
    scaled = PixelScale(processor).normalise(NOISE)
    torch.testing.assert_close(scaled, NOISE * processor.rescale_factor)


def test_pixels_are_bytes_and_leave_with_the_tower(family: VideoLanguageModel) -> None:
    prompt = prepare(family, user(0, 1, "what?"), clip(), image())
    pixels = [item.pixels for item in prompt.items]
    assert [each.dtype for each in pixels if each is not None] == [torch.uint8] * 2
    freed = [weakref.ref(each) for each in pixels if each is not None]
    del pixels
    expected = family.embed_visual(prompt)
    bare = prompt.without_pixels()
    del prompt
    assert [reference() for reference in freed] == [None, None]
    assert [item.pixels for item in bare.items] == [None, None]
    *_, logits = family.prefill(0, bare, expected, None)
    assert logits is not None


def _pieces(model: VideoLanguageModel, *media: DecodedMedia) -> tuple[int, torch.Tensor | None]:
    pieces = model.embed_pieces(prepare(model, user(*range(len(media)), "what?"), *media))
    num_pieces = 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return num_pieces, end.value
        num_pieces += 1


@pytest.mark.parametrize("name", ["target_checkpoint", "llava_checkpoint"])
def test_pieces_are_parts_of_videos_and_whole_images(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = request.getfixturevalue(name)
    model = load_model(LoadPlan(str(folder), dtype="float32", max_context_length=512))
    assert _pieces(model) == (0, None)
    media = clip(num_frames=6), image(), clip(num_frames=2, seed=1)
    num_pieces, whole = _pieces(model, *media)
    assert num_pieces == 3
    video = prepare(model, user(0, "what?"), media[0]).items[0].pixels
    assert video is not None
    monkeypatch.setattr("hippo.models.families.qwen_vl.VISION_PATCHES", video.shape[0] // 3)
    monkeypatch.setattr("hippo.models.families.llava_onevision.VISION_FRAMES", 2)
    num_pieces, parts = _pieces(model, *media)
    assert num_pieces == 5
    assert whole is not None and parts is not None
    torch.testing.assert_close(parts, whole)
    assert torch.equal(parts, model.embed_visual(prepare(model, user(0, 1, 2, "?"), *media)))  # type: ignore[arg-type]


def test_a_kind_is_normalised_by_its_own_processor(llava_checkpoint: Path) -> None:
    model = load_model(LoadPlan(str(llava_checkpoint), dtype="float32", max_context_length=512))
    tower = model._tower  # type: ignore[attr-defined]
    pixels = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    assert torch.equal(tower.on_device(pixels, MediaKind.IMAGE), torch.ones(1, 3, 2, 2))
    tower._scales[MediaKind.VIDEO]._mean[:] = 255.0
    assert torch.equal(tower.on_device(pixels, MediaKind.VIDEO), torch.zeros(1, 3, 2, 2))
