"""A decode step at a long context moves what it moves at a short one, but for attention's reads."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hippo.models.cached import CachedModel
from hippo.models.interface.base import NO_INDICES, Prompt, SequenceRows, StepPlan
from tests.support.devices.tensor_trace import TensorTrace
from tests.support.models.pairs import load

SHORT, LONG = 1024, 8192
MASK_OPERATORS = {"aten.full.default", "aten.triu_.default", "aten.repeat_interleave.self_int"}


@pytest.fixture(scope="module")
def model(target_checkpoint: Path) -> CachedModel:
    return load(target_checkpoint, num_slots=4, max_context_length=LONG + 64)


@pytest.fixture(scope="module")
def filled(model: CachedModel) -> CachedModel:
    """Slots 0 and 1 have short prompts, slots 2 and 3 long ones."""
    for slot, length in enumerate((SHORT, SHORT, LONG, LONG)):
        list(model.prefill(slot, text_prompt(length), None, None))
    return model


def text_prompt(length: int) -> Prompt:
    places = torch.arange(length)
    nothing = NO_INDICES
    return Prompt(places % 200, places.expand(3, -1), length, nothing, (), nothing, b"")


def traced(model: CachedModel, *rows: SequenceRows) -> TensorTrace:
    trace = TensorTrace()
    with trace:
        model.forward(StepPlan(rows))
    return trace


def mask_bytes(model: CachedModel, num_rows: int) -> int:
    """How much longer a mask of the rows is after the long prompt."""
    text = model.model.config.text_config
    groups: int = text.num_attention_heads // text.num_key_value_heads
    return num_rows * groups * (LONG - SHORT) * 4


@pytest.mark.parametrize("num_rows", [1, 2, 9, 32])
def test_a_step_writes_more_after_8000_tokens_only_into_one_mask_of_its_few_rows(
    filled: CachedModel, num_rows: int
) -> None:
    ids = tuple(range(3, 3 + num_rows))
    short, long = (traced(filled, SequenceRows(slot, 0, ids)) for slot in (0, 2))
    if num_rows == 1:  # a target-only step has no mask
        assert (short.written, short.peak_bytes) == (long.written, long.peak_bytes)
    grown = long.written - short.written
    assert set(grown) <= MASK_OPERATORS
    assert sum(grown.values()) <= 3 * mask_bytes(filled, num_rows)


def test_steps_of_several_sequences_write_more_only_into_one_mask(filled: CachedModel) -> None:
    rows = {slots: [SequenceRows(slot, 0, (5,)) for slot in slots] for slots in ((0, 1), (2, 3))}
    for step in rows.values():
        filled.forward(StepPlan(tuple(step)))  # clears what is not defined, for many steps to come
    short, long = (traced(filled, *step) for step in rows.values())
    positions, comparisons, masks = 8, 2 * 1, 2 * 4  # bytes a column
    grown = sum((long.written - short.written).values())
    assert grown <= (positions + comparisons + 2 * masks) * (LONG - SHORT)


def test_no_step_of_an_answer_pays_for_the_positions_of_those_that_follow(
    model: CachedModel,
) -> None:
    list(model.prefill(0, text_prompt(2040), None, None))
    steps = [traced(model, SequenceRows(0, index, (5,))) for index in (0, 7, 8, 9, 3000)]
    assert all(step.written == steps[0].written for step in steps[1:])


@pytest.mark.parametrize("num_rows", [1, 9])
def test_no_kernel_of_a_step_takes_more_memory_for_itself_after_more_tokens(
    filled: CachedModel, num_rows: int
) -> None:
    masks = 0 if num_rows == 1 else 2  # the mask, and the mask repeated
    short, long = (
        allocated(filled, SequenceRows(slot, 0, tuple(range(3, 3 + num_rows)))) for slot in (0, 2)
    )
    assert long - short <= masks * mask_bytes(filled, num_rows)


def allocated(model: CachedModel, *rows: SequenceRows) -> int:
    """All that a forward takes from the allocator, kernels' own buffers included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model.forward(StepPlan(rows))
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


def test_a_copy_of_the_keys_would_be_seen() -> None:
    keys = torch.zeros(1, 4, 2, 100, 8)
    with TensorTrace() as trace:
        keys[0, :, 1, :50].clone()
        keys[0, :, 1, 50:].mul_(2.0)
        keys[0].transpose(0, 1).expand(2, 4, 100, 8)  # a view
    half = 4 * 50 * 8 * 4
    assert trace.written == {"aten.clone.default": half, "aten.mul_.Tensor": half}
    assert trace.peak_bytes == half
