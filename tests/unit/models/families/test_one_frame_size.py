"""InternVL and LLaVA-OneVision, whose frames have one size."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.errors import InvalidRequestError, ModelLoadError
from hippo.media.resizing import fit_frames
from hippo.models.families.llava_onevision import LlavaPromptBuilder
from hippo.models.families.pixels import PixelScale
from hippo.models.interface.base import DecodedMedia, Prompt, VideoLanguageModel
from hippo.types import ChatMessage, FramePlan
from tests.support.models.internvl import write_internvl_checkpoint
from tests.support.models.llava import ORDERED_TEMPLATE, llava_processor
from tests.support.models.pairs import load
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

LLAVA_PROCESSOR = llava_processor()


@pytest.fixture(scope="module")
def internvl(internvl_checkpoint: Path) -> VideoLanguageModel:
    return load(internvl_checkpoint)


@pytest.mark.parametrize(
    "turn",
    [
        (clip(), "and", clip(num_frames=6, seed=1)),
        (image(), "and", image(height=30, width=90, seed=1), "and", image(height=28, width=28)),
        (image(), clip(size=60), "and", image(height=90, width=30, seed=1)),
    ],
)
def test_ids_and_pixels_are_the_processors_to_the_last_bit(
    internvl: VideoLanguageModel, internvl_checkpoint: Path, turn: tuple[str | DecodedMedia, ...]
) -> None:
    reference = Reference(internvl_checkpoint)
    messages, media = arranged(turn)
    inputs = reference.inputs(messages, media)
    prompt = prepare(internvl, messages, *media)
    assert prompt.input_ids.tolist() == inputs["input_ids"][0].tolist()
    written = sorted(prompt.items, key=lambda item: int(item.places[0]))
    scale = PixelScale(reference.processor.video_processor)
    pixels = [scale.normalise(item.pixels) for item in written if item.pixels is not None]
    assert torch.equal(torch.cat(pixels), inputs["pixel_values"])


def test_a_tower_takes_a_few_pictures_at_once(
    internvl_checkpoint: Path, internvl: VideoLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hippo.models.families.family.CPU_VISION_PATCHES", 2 * 16 + 15)
    model = load(internvl_checkpoint)
    prompt = prepare(model, user(0, 1, "?"), clip(num_frames=5), image(height=30, width=120))
    assert [len(item.pixels) for item in prompt.items if item.pixels is not None] == [5, 5]
    assert len(list(model.embed_pieces(prompt))) == 3 + 3
    torch.testing.assert_close(model.embed_visual(prompt), internvl.embed_visual(prompt))


def test_a_language_model_of_internvl3_gives_transformers_own_logits(tmp_path: Path) -> None:
    folder = write_internvl_checkpoint(tmp_path / "tiny", language="qwen2")
    model = load(folder)
    prompt = prepare(model, user(0, "what?"), clip())
    kept = torch.tensor([1, 5, 6])
    assert_close(prefill(model, 0, prompt, kept), Reference(folder).recompute(prompt, kept, ())[0])


def test_as_many_frames_as_fit_with_their_text(internvl: VideoLanguageModel) -> None:
    room, limits = 400, internvl.frame_limits
    num_frames = fit_frames(300, 84, 84, FramePlan(max_visual_tokens=room), limits)
    prompt = prepare(internvl, user(0, "what?"), clip(num_frames=num_frames))
    assert room // 4 > num_frames > 10
    assert prompt.length <= prepare(internvl, user("what?")).length + room


def build(
    processor: Any, messages: Sequence[ChatMessage], *media: DecodedMedia, max_pixels: int = 0
) -> Prompt:
    builder = LlavaPromptBuilder(processor, max_context_length=4096)
    return builder.build_prompt(messages, media, FramePlan(max_pixels=max_pixels))


def test_adjacent_videos_keep_a_newline_each() -> None:
    ordered = llava_processor(ORDERED_TEMPLATE)
    clips = clip(num_frames=2), clip(num_frames=5, seed=1), clip(num_frames=1, seed=2)
    prompt = build(ordered, user(0, 1, "what?", 2), *clips)
    assert prompt.visual_grids == ((2, 3, 3), (5, 3, 3), (1, 3, 3))
    first = int(prompt.visual_indices[0])
    assert prompt.other_indices[:2].tolist() == [first + 18, first + 18 + 1 + 45]
    places = torch.cat((prompt.visual_indices, prompt.other_indices)).sort().values
    is_video = prompt.input_ids == ordered.video_token_id
    assert torch.equal(places, is_video.nonzero()[:, 0])


@pytest.mark.parametrize("parts", [(0, "what is it?"), ("what is it?", 0)])
def test_the_hubs_template_puts_the_question_last_whatever_the_order(
    parts: tuple[str | int, ...],
) -> None:
    prompt = build(LLAVA_PROCESSOR, user(*parts), clip())
    question = LLAVA_PROCESSOR.tokenizer.decode(prompt.input_ids[prompt.question_indices])
    assert question == "what is it?"
    assert int(prompt.question_indices[0]) > int(prompt.visual_indices[-1])


def test_a_cap_on_pixels_below_the_frames_one_size_is_refused() -> None:
    build(LLAVA_PROCESSOR, user(0, "what?"), clip(), max_pixels=38 * 38)
    with pytest.raises(InvalidRequestError, match=r"every frame at 38 x 38 pixels.*cannot be 1443"):
        build(LLAVA_PROCESSOR, user(0, "what?"), clip(), max_pixels=38 * 38 - 1)


def test_a_template_that_leaves_media_out_is_reported() -> None:
    deaf = llava_processor("{% for message in messages %}{{ message['role'] }}{% endfor %}")
    with pytest.raises(InvalidRequestError, match="writes 0 media items for the 1"):
        build(deaf, user(0, "what?"), clip())


LLAVA, INTERNVL = "llava_checkpoint", "internvl_checkpoint"
CONFIG, PROCESSOR = "config.json", "processor_config.json"
TEXT, WHOLE = ("text_config",), ()
SLIDING = ["sliding_attention"] * 3
WINDOWS = {"use_sliding_window": True, "sliding_window": 128, "layer_types": SLIDING}
ROTARY = {"rope_theta": 10000.0, "factor": 2.0, "rope_type": "dynamic"}
DYNAMIC = {"max_position_embeddings": 255, "rope_parameters": ROTARY}


@pytest.mark.parametrize(
    ("checkpoint", "file", "place", "values", "said"),
    [
        (LLAVA, CONFIG, TEXT, WINDOWS, "sliding window of 128"),
        (LLAVA, CONFIG, TEXT, {"model_type": "llama"}, "language model is a 'llama'"),
        (LLAVA, CONFIG, WHOLE, {"vision_feature_select_strategy": "default"}, "'default' is not"),
        (LLAVA, PROCESSOR, WHOLE, {"num_image_tokens": 729}, "counts 729 tokens .* gives 25"),
        (LLAVA, PROCESSOR, ("video_processor",), {"size": {"shortest_edge": 9}}, "frames of size"),
        (INTERNVL, CONFIG, TEXT, {"model_type": "gpt_oss"}, "supported with 'qwen2' or 'qwen3'"),
        (INTERNVL, CONFIG, TEXT, DYNAMIC, r"rotary positions \('dynamic'\) .* at most 255"),
        (INTERNVL, CONFIG, WHOLE, {"downsample_ratio": 0.25}, r"ratio 0\.25 .*, only 0\.5"),
        (INTERNVL, CONFIG, WHOLE, {"vision_feature_select_strategy": "full"}, "'full' is not"),
        (INTERNVL, PROCESSOR, WHOLE, {"image_seq_length": 256}, "256 tokens a frame .* gives 4"),
        (INTERNVL, PROCESSOR, ("image_processor", "size"), {"height": 56}, "makes tiles of size"),
        (INTERNVL, PROCESSOR, ("video_processor", "size"), {"height": 56}, "makes frames of size"),
    ],
)
def test_a_checkpoint_that_cannot_work_is_refused(
    checkpoint: str,
    file: str,
    place: tuple[str, ...],
    values: dict[str, Any],
    said: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(checkpoint), tmp_path / "copy"))
    content = json.loads((folder / file).read_text())
    changed = content
    for key in place:
        changed = changed[key]
    changed.update(values)
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=said):
        load(folder)
