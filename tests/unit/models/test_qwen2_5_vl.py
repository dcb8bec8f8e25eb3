"""The Qwen2.5-VL adapter gives what transformers gives, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.errors import ContextLengthError, InvalidRequestError, MediaError
from hippo.models.base import Prompt, SequenceRows, StepPlan, VideoLanguageModel
from hippo.models.family import CachedModel
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from hippo.types import ChatMessage, FramePlan, TextPart
from tests.support.reference import Reference, clip, image, prefill, prepare, user

COMPLETION = tuple(range(40, 64))

VIDEO = {"type": "video"}


def step(slot: int, start: int, *ids: int) -> StepPlan:
    return StepPlan((SequenceRows(slot, start, ids),))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)


@pytest.fixture(scope="module")
def prompt(model: VideoLanguageModel) -> Prompt:
    return prepare(model, user(0, "what is in the thing?"), clip())


ORDERS: dict[str, tuple[str | int, ...]] = {
    "video first": (0, "what is in the thing?"),
    "question first": ("what is in the thing?", 0),
    "two videos": (0, "what is in the thing?", 1),
    "text only": ("what is in the thing?",),
}


@pytest.mark.parametrize("order", ORDERS)
def test_prefill_and_greedy_output_equal_transformers_own(
    model: VideoLanguageModel, reference: Reference, order: str
) -> None:
    parts = ORDERS[order]
    clips = [clip(), clip(num_frames=3, size=112, fps=0.7, seed=1)]
    used = clips[: sum(isinstance(part, int) for part in parts)]
    content = [{"type": "text", "text": p} if isinstance(p, str) else VIDEO for p in parts]
    inputs = reference.inputs(content, used)
    prompt = prepare(model, user(*parts), *used)
    assert prompt.input_ids.tolist() == inputs["input_ids"][0].tolist()
    logits = prefill(model, 0, prompt)
    assert_close(logits, reference.forward(inputs)[-1])
    generated = reference.generate(inputs, 24)
    assert greedy(model, 0, logits, len(generated)) == generated


def greedy(
    model: VideoLanguageModel, slot: int, logits: torch.Tensor, num_tokens: int
) -> list[int]:
    ids = [int(logits.argmax())]
    while len(ids) < num_tokens:
        ids.append(int(model.forward(step(slot, len(ids) - 1, ids[-1]))[0].argmax()))
    return ids


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 12, 16])
def test_a_block_of_rows_after_a_prefill_equals_recomputing(
    model: VideoLanguageModel, reference: Reference, prompt: Prompt, num_rows: int
) -> None:
    prefill(model, 0, prompt)
    first = model.forward(step(0, 0, *COMPLETION[:num_rows]))
    second = model.forward(step(0, num_rows, *COMPLETION[num_rows : num_rows + 5]))
    expected = reference.recompute(prompt, None, COMPLETION[: num_rows + 5])
    assert_close(torch.cat((first, second)), expected[1:])


def test_more_rows_than_a_group_takes_equal_recomputing(
    model: VideoLanguageModel, reference: Reference, prompt: Prompt
) -> None:
    prefill(model, 0, prompt)
    ids = tuple(range(1, 60))
    assert_close(model.forward(step(0, 0, *ids)), reference.recompute(prompt, None, ids)[1:])


@pytest.mark.parametrize(("is_packed", "num_computed"), [(True, 40), (False, 34)])
def test_a_forward_is_filled_up_where_numbers_of_rows_are_prepared(
    target_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_packed: bool,
    num_computed: int,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: is_packed)
    model = load_model(LoadPlan(str(target_checkpoint), dtype="float32", max_context_length=512))
    assert isinstance(model, CachedModel)
    prefill(model, 0, prepare(model, user("what?")))
    numbers, run = [], model._stack.run

    def counting(hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        numbers.append(hidden.shape[0])
        return run(hidden, *others)

    monkeypatch.setattr(model._stack, "run", counting)
    assert model.forward(step(0, 0, *range(1, 35))).shape[0] == 34
    assert numbers == [num_computed]


def test_rolling_back_then_stepping_equals_recomputing(
    model: VideoLanguageModel, reference: Reference, prompt: Prompt
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


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), data=st.data())
@settings(max_examples=25, deadline=None)
def test_blocks_of_any_lengths_in_one_forward_equal_each_alone(
    model: VideoLanguageModel, prompt: Prompt, lengths: list[int], data: st.DataObject
) -> None:
    texts = [prepare(model, user("and another thing")), prompt, prepare(model, user("what?"))]
    rows = []
    for slot, length in enumerate(lengths):
        prefill(model, slot, texts[slot])
        ids = data.draw(st.lists(st.integers(1, 250), min_size=length, max_size=length))
        num_before = data.draw(st.integers(0, length - 1))
        if num_before:
            model.forward(step(slot, 0, *ids[:num_before]))
        rows.append(SequenceRows(slot, num_before, tuple(ids[num_before:])))
    together = model.forward(StepPlan(tuple(rows)))
    assert together.shape[0] == sum(len(one.token_ids) for one in rows)
    assert_close(together, torch.cat([model.forward(StepPlan((one,))) for one in rows]))


@pytest.mark.parametrize("kept", [[], [0], [26], [1, 5, 6, 20], list(range(27))])
@pytest.mark.parametrize("is_video_first", [True, False])
def test_prefill_on_a_subset_equals_a_forward_without_the_dropped_tokens(
    model: VideoLanguageModel, reference: Reference, kept: list[int], is_video_first: bool
) -> None:
    parts: tuple[str | int, ...] = (0, "what?") if is_video_first else ("what?", 0)
    prompt = prepare(model, user(*parts), clip())
    assert prompt.visual_grids == ((3, 3, 3),)
    indices = torch.tensor(kept, dtype=torch.int64)
    logits = prefill(model, 0, prompt, indices)
    rows = model.forward(step(0, 0, *COMPLETION[:4]))
    expected = reference.recompute(prompt, indices, COMPLETION[:4])
    assert_close(torch.cat((logits[None], rows)), expected)


def test_images_stay_when_video_tokens_are_dropped(
    model: VideoLanguageModel, reference: Reference
) -> None:
    prompt = prepare(model, user(0, "a picture, and", 1, "a clip"), image(), clip())
    assert prompt.visual_indices.shape == (27,)
    assert prompt.extras["image_indices"].shape == (6,)
    kept = torch.tensor([3, 4])
    logits = prefill(model, 0, prompt, kept)
    assert_close(logits, reference.recompute(prompt, kept, ())[-1])


def test_positions_follow_the_sampled_frame_rate(
    model: VideoLanguageModel, reference: Reference
) -> None:
    slow = clip(num_frames=8, fps=0.25)
    prompt = prepare(model, user(0, "what?"), slow)
    inputs = reference.inputs([VIDEO, {"type": "text", "text": "what?"}], [slow])
    positions, deltas = reference.model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        video_grid_thw=inputs["video_grid_thw"],
        second_per_grid_ts=inputs["second_per_grid_ts"],
    )
    assert torch.equal(prompt.positions, positions[:, 0])
    assert prompt.next_position == prompt.length + int(deltas)
    times = sorted(set(prompt.positions[0, prompt.visual_indices].tolist()))
    assert [time - times[0] for time in times] == [
        0,
        16,
        32,
        48,
    ]  # 2 frames at 0.25 a second, 2 tokens a second


def test_a_prefill_left_early_leaves_the_slot_usable(
    model: VideoLanguageModel, prompt: Prompt
) -> None:
    expected = prefill(model, 0, prompt)
    broken = model.prefill(0, prompt, model.embed_visual(prompt), torch.tensor([0]))
    assert next(broken) is None
    broken.close()
    assert torch.equal(prefill(model, 0, prompt), expected)


@pytest.mark.parametrize("chunk_rows", [8, 33, 37])
def test_a_long_prompt_is_prefilled_in_chunks_with_the_same_result(
    model: VideoLanguageModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    assert prompt.length > 2 * 37
    expected = prefill(model, 0, prompt)
    monkeypatch.setattr("hippo.models.family._CHUNK_ROWS", chunk_rows)
    assert_close(prefill(model, 1, prompt), expected)


@pytest.mark.parametrize("model", ["fused"], indirect=True)
@pytest.mark.parametrize("chunk_rows", [33, 1024])
def test_the_last_layer_of_a_prompt_goes_on_with_its_last_row_only(
    model: VideoLanguageModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    rows = []

    def silu(gate: torch.Tensor) -> torch.Tensor:
        rows.append(gate.shape[0])
        return torch.nn.functional.silu(gate)

    monkeypatch.setattr("hippo.models.family._CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr("hippo.models.decoder.silu", silu)
    prefill(model, 0, prompt)
    chunks = [min(chunk_rows, prompt.length - i) for i in range(0, prompt.length, chunk_rows)]
    assert rows[-len(chunks) :] == [1] * len(chunks)
    assert sum(rows) == (model.num_layers - 1) * prompt.length + len(chunks)


def test_rotary_positions_beyond_the_first_table_equal_recomputing(
    model: VideoLanguageModel, reference: Reference
) -> None:
    prompt = prepare(model, user(0, "what?"), clip(num_frames=8, fps=0.01))
    assert prompt.next_position > 1000
    prefill(model, 0, prompt)
    assert_close(
        model.forward(step(0, 0, *COMPLETION[:3])),
        reference.recompute(prompt, None, COMPLETION[:3])[1:],
    )


def test_logits_are_cut_to_the_tokenizers_ids(model: VideoLanguageModel, prompt: Prompt) -> None:
    logits = prefill(model, 0, prompt)
    assert logits.shape == (model.info.num_token_ids,)
    assert model.forward(step(0, 0, 5, 6)).shape == (2, model.info.num_token_ids)
    assert logits.dtype == torch.float32


def test_prompts_differ_in_their_hash(model: VideoLanguageModel) -> None:
    one, same, other = (prepare(model, user(text)) for text in ("a", "a", "b"))
    assert one.prompt_hash == same.prompt_hash != other.prompt_hash
    assert len(one.prompt_hash) == 32


def test_a_cap_on_pixels_makes_fewer_tokens(model: VideoLanguageModel) -> None:
    messages, clips = user(0, "what?"), [clip(size=168)]
    free = model.prepare(messages, clips, FramePlan())
    capped = model.prepare(messages, clips, FramePlan(max_pixels=56 * 56))
    assert free.visual_grids == ((3, 6, 6),)
    assert capped.visual_grids == ((3, 2, 2),)


def test_a_prompt_beyond_the_context_is_refused(model: VideoLanguageModel) -> None:
    with pytest.raises(ContextLengthError, match="context of 512"):
        prepare(model, user("word " * 200))


def test_a_full_slot_is_refused(model: VideoLanguageModel, prompt: Prompt) -> None:
    prefill(model, 0, prompt)
    room = 512 - prompt.length
    model.forward(step(0, room - 1, 5))
    with pytest.raises(ContextLengthError):
        model.forward(step(0, room - 1, 5, 6))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (user("see", 1), "media item 1"),
        (user("nothing"), "no message refers to media item 0"),
        (user(0, "<|video_pad|>"), "may not contain"),
        ([], "at least one message"),
    ],
)
def test_messages_that_do_not_fit_the_media_are_refused(
    model: VideoLanguageModel, messages: list[ChatMessage], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        prepare(model, messages, clip())


def test_a_shape_that_the_processor_refuses_is_a_media_error(model: VideoLanguageModel) -> None:
    with pytest.raises(MediaError, match="aspect ratio"):
        prepare(model, user(0, "what?"), image(height=1, width=300))


def test_a_system_message_replaces_the_templates_own(model: VideoLanguageModel) -> None:
    system = ChatMessage("system", (TextPart("Speak plainly."),))
    with_system = prepare(model, [system, *user("hello")])
    assert not torch.equal(with_system.input_ids, prepare(model, user("hello")).input_ids)
