"""Each family's model gives what transformers gives, float32."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.errors import InvalidRequestError
from hippo.models.interface.base import DecodedMedia, Prompt, SequenceRows, StepPlan
from hippo.models.interface.content import compacted
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.types import ChatMessage, MediaKind
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.families import ALL_FAMILIES, ORDERED_LLAVA
from tests.support.models.pairs import load
from tests.support.models.reference import (
    Reference,
    arranged,
    assert_close,
    clip,
    image,
    prefill,
    prepare,
    step,
    user,
)
from tests.unit.models.conftest import Held

QUESTION = "what is in the thing?"
COMPLETION = tuple(range(1, 66))
TURNS: dict[str, tuple[str | DecodedMedia, ...]] = {
    "video first": (clip(), QUESTION),
    "question first": (QUESTION, clip()),
    "frames far apart": (clip(fps=0.05), QUESTION),
    "two videos": (clip(num_frames=3), QUESTION, clip(num_frames=3, size=112, fps=0.7, seed=1)),
    "image": (image(), QUESTION),
    "image of 16 tiles, resized": (image(height=200, width=200), "what?"),
    "two images": (image(), image(height=90, width=40, seed=1), QUESTION),
    "video and image": (clip(), QUESTION, image()),
    "text only": (QUESTION,),
}
# Frames, two seconds each, of how many pixels a side; the text before the last. With experts
# Qwen3-VL reads a video as it does without.
LONG_VIDEOS = {
    "qwen2_vl": (64, 168, "<|video_pad|>"),
    "qwen2_5_vl": (64, 168, "<|video_pad|>"),
    "qwen3_5": (64, 140, "<125.0 seconds>"),
    "qwen3_vl": (64, 140, "<125.0 seconds>"),
    "llava_onevision": (120, 84, "<video>"),
    "internvl": (101, 84, "Frame101: "),
}


@pytest.fixture
def prompt(held: Held) -> Prompt:
    return prepare(held.model, user(0, QUESTION), clip())


@pytest.mark.parametrize("held", [*ALL_FAMILIES, ORDERED_LLAVA], indirect=True)
@pytest.mark.parametrize("turn", TURNS)
def test_prefill_and_steps_equal_transformers_own(held: Held, turn: str) -> None:
    messages, media = arranged(TURNS[turn])
    inputs = held.reference.inputs(messages, media)
    prompt = prepare(held.model, messages, *media)
    assert prompt.input_ids.tolist() == inputs["input_ids"][0].tolist()
    logits = [prefill(held.model, 0, prompt)]
    ids = COMPLETION[:8]
    logits += [held.model.forward(step(0, place, token))[0] for place, token in enumerate(ids)]
    assert_close(torch.stack(logits), held.reference.forward(inputs, ids)[prompt.length - 1 :])


def test_videos_of_different_lengths_equal_transformers_own(held: Held) -> None:
    clips = clip(), clip(num_frames=3, size=112, seed=1), clip(num_frames=20, seed=2)
    prompt = prepare(held.model, user(0, "what is", 1, "in the", 2, "thing?"), *clips)
    assert len({frames for frames, _, _ in prompt.visual_grids}) == 3
    logits = prefill(held.model, 0, prompt)
    assert_close(logits, held.reference.recompute(prompt, None, ())[0])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 12, 16, 59])
def test_a_block_of_rows_and_one_behind_a_rollback_equal_recomputing(
    held: Held, prompt: Prompt, num_rows: int
) -> None:
    prefill(held.model, 0, prompt)
    first = held.model.forward(step(0, 0, *COMPLETION[:num_rows], 200, 201))
    second = held.model.forward(step(0, num_rows, *COMPLETION[num_rows : num_rows + 5]))
    expected = held.reference.recompute(prompt, None, COMPLETION[: num_rows + 5])
    assert_close(torch.cat((first[:num_rows], second)), expected[1:])


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), data=st.data())
@settings(max_examples=12, deadline=None)
def test_blocks_of_any_lengths_in_one_forward_equal_each_alone(
    held: Held, lengths: list[int], data: st.DataObject
) -> None:
    model = held.model
    turns = (user("and another thing"), ()), (user(0, QUESTION), (clip(),)), (user("what?"), ())
    rows = []
    for slot, length in enumerate(lengths):
        prefill(model, slot, prepare(model, turns[slot][0], *turns[slot][1]))
        ids = data.draw(st.lists(st.integers(1, 250), min_size=length, max_size=length))
        num_before = data.draw(st.integers(0, length - 1))
        if num_before:
            model.forward(step(slot, 0, *ids[:num_before]))
        rows.append(SequenceRows(slot, num_before, tuple(ids[num_before:])))
    rows = data.draw(st.permutations(rows))
    together = model.forward(StepPlan(tuple(rows)))
    assert together.shape[0] == sum(len(one.token_ids) for one in rows)
    assert_close(together, torch.cat([model.forward(StepPlan((one,))) for one in rows]))


@pytest.mark.parametrize("kept", [[], [0], [-1], [1, 5, 6, 20], None])
@pytest.mark.parametrize("parts", [(0, 1, "what?"), ("what?", 0, 1)])
def test_prefill_on_a_subset_equals_a_forward_without_the_dropped_tokens(
    held: Held, kept: list[int] | None, parts: tuple[str | int, ...]
) -> None:
    prompt = prepare(held.model, user(*parts), clip(), clip(num_frames=2, seed=1))
    indices = torch.arange(prompt.visual_indices.shape[0])
    if kept is not None:
        indices = indices[torch.tensor(kept, dtype=torch.int64)]
    logits = prefill(held.model, 0, prompt, indices)
    rows = held.model.forward(step(0, 0, *COMPLETION[:4]))
    expected = held.reference.recompute(prompt, indices, COMPLETION[:4])
    assert_close(torch.cat((logits[None], rows)), expected)


def test_images_stay_when_video_tokens_are_dropped(held: Held) -> None:
    prompt = prepare(held.model, user(0, "a picture, and", 1, "a clip"), image(), clip())
    (picture,) = (item.places for item in prompt.items if item.kind is MediaKind.IMAGE)
    is_visual = torch.isin(picture, prompt.visual_indices)
    assert is_visual.shape[0] and not is_visual.any()
    kept = torch.tensor([3, 4])
    for placed in (prompt, compacted(prompt, kept)):
        logits = prefill(held.model, 0, placed, kept)
        assert_close(logits, held.reference.recompute(placed, kept, ())[-1])


@pytest.mark.parametrize("chunk_rows", [8, 33, 37])
def test_a_long_prompt_is_prefilled_in_chunks_with_the_same_result(
    held: Held, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    assert prompt.length > 2 * 37
    expected = prefill(held.model, 0, prompt)
    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
    assert_close(prefill(held.model, 1, prompt), expected)


@pytest.mark.parametrize("held", LONG_VIDEOS, indirect=True)
def test_a_long_video_equals_transformers_own(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", 500)
    plan = LoadPlan(str(held.folder), dtype="float32", max_context_length=4096)
    model, family = load_model(plan), held.reference.model.config.model_type
    num_frames, size, last_text = LONG_VIDEOS[family]
    messages, media = arranged((clip(num_frames=num_frames, size=size, fps=0.5), QUESTION))
    inputs = held.reference.inputs(messages, media)
    prompt = prepare(model, messages, *media)
    assert prompt.input_ids.tolist() == inputs["input_ids"][0].tolist()
    assert prompt.length > 2 * 500
    assert last_text in held.reference.processor.tokenizer.decode(prompt.input_ids)
    block = COMPLETION[:4]
    logits = prefill(model, 0, prompt)[None]
    expected = held.reference.forward(inputs, block)[prompt.length - 1 :]
    assert_close(torch.cat((logits, model.forward(step(0, 0, *block)))), expected)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (user("see", 1), "media item 1"),
        (user("nothing"), "no message refers to media item 0"),
        ([], "at least one message"),
    ],
)
def test_messages_that_do_not_fit_the_media_are_refused(
    held: Held, messages: list[ChatMessage], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        prepare(held.model, messages, clip())


def test_features_for_more_layers_than_there_are_are_ignored(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", family="qwen3_vl", num_layers=1)
    model = load(folder)
    prompt = prepare(model, user(0, QUESTION), clip())
    assert_close(prefill(model, 0, prompt), Reference(folder).recompute(prompt, None, ())[0])
