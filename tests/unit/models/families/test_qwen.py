"""Qwen: prompts are those of transformers' processor to the last bit; what a forward computes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hippo.errors import MediaError
from hippo.models.cached import CachedModel
from hippo.models.families.pixels import PixelScale
from hippo.models.families.qwen_prompt import QwenPromptBuilder, TimedPromptBuilder
from hippo.models.interface.base import DecodedMedia, Prompt, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.prompts.builder import resized
from hippo.types import ChatMessage, FramePlan, MediaKind, TextPart
from tests.support.models.processors import running_on
from tests.support.models.reference import (
    Reference,
    arranged,
    assert_close,
    clip,
    image,
    noise,
    prefill,
    prepare,
    step,
    user,
)


def builder(reference: Reference) -> QwenPromptBuilder:
    return QwenPromptBuilder(
        reference.processor, reference.model.model.get_rope_index, max_context_length=4096
    )


def video(num_frames: int, height: int, width: int, *, seed: int = 0) -> DecodedMedia:
    seconds = tuple(index / 3 for index in range(num_frames))
    return DecodedMedia(MediaKind.VIDEO, noise(num_frames, height, width, seed), seconds, 3.0)


TURNS: dict[str, tuple[int, tuple[str | DecodedMedia, ...]]] = {
    "as it is": (0, (video(4, 56, 84), "what is in it?")),
    "resized": (0, ("what is in it?", video(4, 61, 75))),
    "odd frames": (0, (video(5, 133, 150), "who is there?")),
    "enlarged": (0, (video(2, 20, 31), "small?")),
    "capped": (6000, (video(6, 140, 196), "fewer pixels?")),
    "two": (0, (video(4, 56, 56), "one,", video(3, 84, 70, seed=1), "two")),
    "image": (0, (image(), "a picture,", video(4, 56, 56), "a clip")),
    "text": (0, ("no video  at all? ",)),
}


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("turn", TURNS)
def test_a_prompt_is_what_the_processor_makes_of_it(
    reference: Reference, turn: str, is_later: bool
) -> None:
    max_pixels, parts = TURNS[turn]
    plan, prompts = FramePlan(max_pixels=max_pixels), builder(reference)
    messages, media = arranged(parts)
    if is_later:
        system = ChatMessage("system", (TextPart("be brief"),))
        answer = ChatMessage("assistant", (TextPart("an answer\n"),))
        messages = [system, *messages, answer, *user("why?")]
    prompt = prompts.build_prompt(messages, media, plan)
    expected = reference.inputs(
        messages, [resized(item, plan, prompts.frame_limits) for item in media]
    )
    assert prompt.input_ids.tolist() == expected["input_ids"][0].tolist()
    processor = reference.processor
    for kind, own, pixels_name in (
        (MediaKind.VIDEO, processor.video_processor, "pixel_values_videos"),
        (MediaKind.IMAGE, processor.image_processor, "pixel_values"),
    ):
        items = [item for item in prompt.items if item.kind is kind]
        if items:
            pixels = torch.cat([item.pixels for item in items if item.pixels is not None])
            assert torch.equal(PixelScale(own).normalise(pixels), expected[pixels_name])
            grids = expected[f"{kind.value}_grid_thw"].tolist()
            assert [list(item.grid) for item in items] == grids
    if media:
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
        positions, _ = reference.model.model.get_rope_index(
            **{name: expected.get(name) for name in names},
            second_per_grid_ts=expected.get("second_per_grid_ts"),
        )
        assert torch.equal(prompt.positions, positions[:, 0])


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
    sizes = [(each.num_frames, each.width, each.height, each.num_tokens) for each in videos]
    assert sizes == [(4, 84, 56, 12), (6, 140, 84, 45)]
    assert [each.visual_grid for each in videos] == [(2, 2, 3), (3, 3, 5)]
    assert [each.frame_seconds for each in videos] == [item.frame_seconds for item in media[1:]]
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


@pytest.fixture(scope="module")
def prompt(model: VideoLanguageModel) -> Prompt:
    return prepare(model, user(0, "what is in the thing?"), clip())


@pytest.mark.parametrize(("is_packed", "num_computed"), [(True, 40), (False, 34)])
def test_a_forward_is_filled_up_where_numbers_of_rows_are_prepared(
    target_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_packed: bool,
    num_computed: int,
) -> None:
    with running_on("AVX2" if is_packed else "unknown"):
        plan = LoadPlan(str(target_checkpoint), dtype="float32", max_context_length=512)
        model = load_model(plan)
    assert isinstance(model, CachedModel)
    prefill(model, 0, prepare(model, user("what?")))
    numbers, run = [], model._stack.run

    def counting(hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        numbers.append(hidden.shape[0])
        return run(hidden, *others)

    monkeypatch.setattr(model._stack, "run", counting)
    assert model.forward(step(0, 0, *range(1, 35))).shape[0] == 34
    assert numbers == [num_computed]


@pytest.mark.parametrize("chunk_rows", [33, 1024])
def test_the_last_layer_of_a_prompt_goes_on_with_its_last_row_only(
    model: VideoLanguageModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    rows = []

    def silu(gate: torch.Tensor) -> torch.Tensor:
        rows.append(gate.shape[0])
        return torch.nn.functional.silu(gate)

    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr("hippo.models.runners.layers.silu", silu)
    prefill(model, 0, prompt)
    chunks = [min(chunk_rows, prompt.length - i) for i in range(0, prompt.length, chunk_rows)]
    assert rows[-len(chunks) :] == [1] * len(chunks)
    assert sum(rows) == (model.num_layers - 1) * prompt.length + len(chunks)


def test_rotary_positions_beyond_the_first_table_equal_recomputing(
    model: VideoLanguageModel, reference: Reference
) -> None:
    prompt = replace(prepare(model, user(0, "what?"), clip()), next_position=1000)
    prefill(model, 0, prompt)
    assert_close(
        model.forward(step(0, 0, 40, 41, 42)),
        reference.recompute(prompt, None, (40, 41, 42))[1:],
    )
