"""The LLaVA-OneVision adapter gives what transformers gives, float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hippo.errors import ContextLengthError
from hippo.models.base import (
    AttentionTap,
    DecodedMedia,
    Prompt,
    SequenceRows,
    StepPlan,
    VideoLanguageModel,
)
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from hippo.types import MediaKind
from tests.support.attention import reference_scores
from tests.support.llava import ORDERED_TEMPLATE, LlavaReference, write_llava_checkpoint
from tests.support.reference import clip, image, prefill, prepare, user

COMPLETION = tuple(range(40, 64))
MEDIA = {MediaKind.VIDEO: {"type": "video"}, MediaKind.IMAGE: {"type": "image"}}


def step(slot: int, start: int, *ids: int) -> StepPlan:
    return StepPlan((SequenceRows(slot, start, ids),))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)


@pytest.fixture(scope="module")
def reference(llava_checkpoint: Path) -> LlavaReference:
    return LlavaReference(llava_checkpoint)


@pytest.fixture(scope="module")
def model(llava_checkpoint: Path) -> VideoLanguageModel:
    return _load(llava_checkpoint)


@pytest.fixture(scope="module")
def ordered(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[VideoLanguageModel, LlavaReference]:
    """A checkpoint whose template keeps the order of a turn's parts."""
    folder = tmp_path_factory.mktemp("ordered") / "tiny"
    write_llava_checkpoint(folder, chat_template=ORDERED_TEMPLATE)
    return _load(folder), LlavaReference(folder)


def _load(folder: Path) -> VideoLanguageModel:
    return load_model(
        LoadPlan(
            str(folder),
            dtype="float32",
            num_slots=3,
            max_context_length=512,
            served_name="tiny",
        )
    )


@pytest.fixture(scope="module")
def prompt(model: VideoLanguageModel) -> Prompt:
    return prepare(model, user(0, "what is in the thing?"), clip())


def greedy(
    model: VideoLanguageModel, slot: int, logits: torch.Tensor, num_tokens: int
) -> list[int]:
    ids = [int(logits.argmax())]
    while len(ids) < num_tokens:
        ids.append(int(model.forward(step(slot, len(ids) - 1, ids[-1]))[0].argmax()))
    return ids


TURNS: dict[str, tuple[str | DecodedMedia, ...]] = {
    "video first": (clip(), "what is in the thing?"),
    "question first": ("what is in the thing?", clip()),
    "two videos": (clip(num_frames=3), "what is in the thing?", clip(num_frames=3, seed=1)),
    "image": (image(), "what is in the thing?"),
    "image of 16 tiles, resized": (image(height=200, width=200), "what?"),
    "two images": (image(), image(height=90, width=40, seed=1), "what is in the thing?"),
    "video and image": (clip(), "what is in the thing?", image()),
    "text only": ("what is in the thing?",),
}


def arranged(
    turn: tuple[str | DecodedMedia, ...],
) -> tuple[list[dict[str, str]], list[str | int], list[DecodedMedia]]:
    """A turn's parts for transformers, its parts for tests.support.reference.user, its media."""
    media = [part for part in turn if isinstance(part, DecodedMedia)]
    numbers = iter(range(len(media)))
    return (
        [{"type": "text", "text": p} if isinstance(p, str) else MEDIA[p.kind] for p in turn],
        [part if isinstance(part, str) else next(numbers) for part in turn],
        media,
    )


def check_turn(
    model: VideoLanguageModel, reference: LlavaReference, turn: tuple[str | DecodedMedia, ...]
) -> None:
    content, parts, media = arranged(turn)
    inputs = reference.inputs(content, media)
    prompt = prepare(model, user(*parts), *media)
    assert prompt.input_ids.tolist() == inputs["input_ids"][0].tolist()
    logits = prefill(model, 0, prompt)
    assert_close(logits, reference.forward(inputs)[-1])
    generated = reference.generate(inputs, 24)
    assert greedy(model, 0, logits, len(generated)) == generated


@pytest.mark.parametrize("turn", TURNS)
def test_prefill_and_greedy_output_equal_transformers_own(
    model: VideoLanguageModel, reference: LlavaReference, turn: str
) -> None:
    check_turn(model, reference, TURNS[turn])


@pytest.mark.parametrize("turn", TURNS)
def test_a_template_that_keeps_the_order_gives_transformers_own_output(
    ordered: tuple[VideoLanguageModel, LlavaReference], turn: str
) -> None:
    check_turn(*ordered, TURNS[turn])


def test_videos_of_different_lengths_equal_transformers_own(
    model: VideoLanguageModel, reference: LlavaReference
) -> None:
    clips = clip(), clip(num_frames=3, size=112, seed=1), clip(num_frames=20, seed=2)
    prompt = prepare(model, user(0, "what is", 1, "in the", 2, "thing?"), *clips)
    assert prompt.visual_grids == ((6, 3, 3), (3, 3, 3), (20, 3, 3))
    logits = prefill(model, 0, prompt)
    assert_close(logits, reference.recompute(prompt, None, ())[0])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 12, 16])
def test_a_block_of_rows_after_a_prefill_equals_recomputing(
    model: VideoLanguageModel, reference: LlavaReference, prompt: Prompt, num_rows: int
) -> None:
    prefill(model, 0, prompt)
    first = model.forward(step(0, 0, *COMPLETION[:num_rows]))
    second = model.forward(step(0, num_rows, *COMPLETION[num_rows : num_rows + 5]))
    expected = reference.recompute(prompt, None, COMPLETION[: num_rows + 5])
    assert_close(torch.cat((first, second)), expected[1:])


def test_rolling_back_then_stepping_equals_recomputing(
    model: VideoLanguageModel, reference: LlavaReference, prompt: Prompt
) -> None:
    prefill(model, 0, prompt)
    model.forward(step(0, 0, *COMPLETION[:12]))
    other = (200, 201, 202, 203)
    logits = model.forward(step(0, 5, *other))
    assert_close(logits, reference.recompute(prompt, None, COMPLETION[:5] + other)[-4:])


def test_sequences_in_one_forward_equal_each_alone(
    model: VideoLanguageModel, prompt: Prompt
) -> None:
    text = prepare(model, user("and another thing"))
    for slot, one in ((0, prompt), (2, text), (1, prompt)):
        prefill(model, slot, one)
    model.forward(step(1, 0, *COMPLETION[:7]))
    rows = (
        SequenceRows(2, 0, COMPLETION[:1]),
        SequenceRows(0, 0, COMPLETION[:6]),
        SequenceRows(1, 7, COMPLETION[7:9]),
    )
    together = model.forward(StepPlan(rows))
    alone = torch.cat([model.forward(StepPlan((one,))) for one in rows])
    assert_close(together, alone)


@pytest.mark.parametrize("kept", [[], [0], [53], [1, 5, 6, 20, 40], list(range(54))])
def test_prefill_on_a_subset_equals_a_forward_without_the_dropped_tokens(
    model: VideoLanguageModel, reference: LlavaReference, prompt: Prompt, kept: list[int]
) -> None:
    assert prompt.visual_grids == ((6, 3, 3),)
    indices = torch.tensor(kept, dtype=torch.int64)
    logits = prefill(model, 0, prompt, indices)
    rows = model.forward(step(0, 0, *COMPLETION[:4]))
    expected = reference.recompute(prompt, indices, COMPLETION[:4])
    assert_close(torch.cat((logits[None], rows)), expected)


def test_a_subset_keeps_original_positions_where_the_question_comes_first(
    ordered: tuple[VideoLanguageModel, LlavaReference],
) -> None:
    model, reference = ordered
    prompt = prepare(model, user("what?", 0, 1), clip(), clip(num_frames=2, seed=1))
    kept = torch.tensor([3, 30, 53, 54, 71])
    logits = prefill(model, 0, prompt, kept)
    rows = model.forward(step(0, 0, *COMPLETION[:4]))
    expected = reference.recompute(prompt, kept, COMPLETION[:4])
    assert_close(torch.cat((logits[None], rows)), expected)


def test_images_stay_when_video_tokens_are_dropped(
    model: VideoLanguageModel, reference: LlavaReference
) -> None:
    prompt = prepare(model, user(0, "a picture, and", 1, "a clip"), image(), clip())
    assert prompt.visual_indices.shape == (54,)
    kept = torch.tensor([3, 4])
    logits = prefill(model, 0, prompt, kept)
    assert_close(logits, reference.recompute(prompt, kept, ())[-1])


def test_the_video_matters_to_the_answer(model: VideoLanguageModel) -> None:
    one, other = (prepare(model, user(0, "what?"), clip(seed=seed)) for seed in (0, 1))
    assert torch.equal(one.input_ids, other.input_ids)
    assert (prefill(model, 0, one) - prefill(model, 0, other)).abs().max() > 0.1


def test_visual_features_are_the_grid_tokens_then_images_then_newlines(
    model: VideoLanguageModel, reference: LlavaReference
) -> None:
    prompt = prepare(model, user(0, 1, "what?", 2), clip(), clip(num_frames=2, seed=1), image())
    features = model.embed_visual(prompt)
    assert features is not None
    num_images = len(prompt.extras["image_indices"])
    assert features.shape == (54 + 18 + 2 + num_images, 64)
    newline = reference.model.model.image_newline.detach()
    assert torch.equal(features[-2:], newline.expand(2, -1))
    frames = prompt.extras["pixel_values_videos"]
    with torch.no_grad():
        first, second = (
            reference.model.model.get_video_features(one[None], return_dict=True).pooler_output[0]
            for one in (frames[:6], frames[6:])
        )
    assert_close(features[:72], torch.cat((first[:-1], second[:-1])))
    assert model.embed_visual(prepare(model, user("only text"))) is None


@pytest.mark.parametrize("turn", ["video first", "question first", "two videos", "video and image"])
@pytest.mark.parametrize("template", ["the hub's", "one that keeps the order"])
def test_the_early_layers_score_as_transformers_own_do(
    model: VideoLanguageModel,
    reference: LlavaReference,
    ordered: tuple[VideoLanguageModel, LlavaReference],
    turn: str,
    template: str,
) -> None:
    if template != "the hub's":
        model, reference = ordered
    content, parts, media = arranged(TURNS[turn])
    prompt = prepare(model, user(*parts), *media)
    tap = AttentionTap(2)
    for _ in model.prefill(0, prompt, model.embed_visual(prompt), None, tap):
        pass
    assert tap.layer_scores is not None
    expected = reference_scores(
        reference.model, reference.inputs(content, media), prompt, num_layers=2, scope="visual"
    )
    torch.testing.assert_close(tap.layer_scores, expected, rtol=1e-3, atol=1e-6)


def test_a_long_prompt_is_prefilled_in_chunks_with_the_same_result(
    model: VideoLanguageModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prefill(model, 0, prompt)
    monkeypatch.setattr("hippo.models.family._CHUNK_ROWS", 37)
    assert_close(prefill(model, 1, prompt), expected)


def test_a_full_slot_is_refused(model: VideoLanguageModel, prompt: Prompt) -> None:
    prefill(model, 0, prompt)
    room = 512 - prompt.length
    model.forward(step(0, room - 1, 5))
    with pytest.raises(ContextLengthError):
        model.forward(step(0, room - 1, 5, 6))
