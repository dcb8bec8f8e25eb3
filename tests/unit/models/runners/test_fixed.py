"""Steps of fixed shape give what ordinary steps give; a row's bits do not depend on the rest."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.errors import ContextLengthError
from hippo.models.attention.parts import SequencePart
from hippo.models.cached import CachedModel
from hippo.models.interface.base import Prompt, SequenceRows, StepPlan
from hippo.models.loading import resolve
from hippo.models.products.linear import Linear, make_linear
from hippo.models.runners.fixed import ExactRunner, split_rows, stretch
from tests.support.models.reference import assert_close, clip, prefill, prepare, step, user
from tests.unit.models.runners.conftest import CONTEXT, Both, load_small


@pytest.fixture(scope="module")
def exact(target_checkpoint: Path) -> CachedModel:
    return load_small(target_checkpoint, exact_rows=5)


@given(st.integers(0, 40_000), st.integers(1, 40_000))
def test_a_stretch_holds_its_row_and_is_that_of_its_last_place(index: int, capacity: int) -> None:
    index %= capacity
    num_tokens = stretch(index, capacity)
    assert index < num_tokens <= max(256, (index + 1) * 5 // 4 + 256)
    assert num_tokens % 16 == 0
    if num_tokens <= capacity:
        assert stretch(num_tokens - 1, capacity) == num_tokens
    assert stretch(max(index - 1, 0), capacity) <= num_tokens


@given(st.integers(0, 5_000), st.integers(1, 200), st.integers(1, 32), st.integers(5_200, 6_000))
def test_rows_are_cut_into_pieces_of_one_stretch(
    start: int, num_rows: int, max_rows: int, capacity: int
) -> None:
    pieces = split_rows(start, num_rows, max_rows=max_rows, capacity=capacity)
    assert [place for piece in pieces for place in piece] == list(range(start, start + num_rows))
    for piece in pieces:
        assert 1 <= len(piece) <= max_rows
        assert len({stretch(place, capacity) for place in piece}) == 1


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), data=st.data())
@settings(max_examples=12, deadline=None)
def test_steps_of_fixed_shape_equal_ordinary_ones(
    both: Both, exact: CachedModel, lengths: list[int], data: st.DataObject
) -> None:
    rows = []
    for slot, length in enumerate(lengths):
        ids = data.draw(st.lists(st.integers(1, 250), min_size=length, max_size=length))
        start = data.draw(st.integers(0, length - 1))
        both.prefill(exact, slot, slot)
        both.agree(exact, step(slot, 0, *ids))  # to be rolled back to ``start``
        rows.append(SequenceRows(slot, start, tuple(reversed(ids[start:]))))
    both.agree(exact, StepPlan(tuple(rows)))


@pytest.mark.parametrize(("dtype", "exact_rows"), [("float32", 3), ("bfloat16", 8), ("float16", 3)])
def test_a_tokens_logits_have_the_same_bits_however_it_was_fed(
    target_checkpoint: Path, prompts: list[Prompt], dtype: str, exact_rows: int
) -> None:
    model = load_small(target_checkpoint, dtype=dtype, exact_rows=exact_rows)
    generator = torch.Generator().manual_seed(1)
    num_tokens = CONTEXT - prompts[0].length
    ids: list[int] = torch.randint(1, 250, (num_tokens,), generator=generator).tolist()

    def is_near(start: int) -> bool:
        """Whether a stretch, the prompt or the slot ends near there."""
        place = prompts[0].length + start
        return start < 20 or (place + 20) % 256 < 40 or place > CONTEXT - 20

    def feed(slot: int, cuts: list[int], other: Prompt | None = None) -> torch.Tensor:
        """Feeds pieces of these lengths near an end, and large ones elsewhere."""
        prefill(model, slot, prompts[0])
        outputs, start, lengths = [], 0, itertools.cycle(cuts)
        if other is not None:
            prefill(model, 2, other)
        while start < num_tokens:
            cut = next((cut for cut in range(40) if is_near(start + cut)), 40) or next(lengths)
            rows = tuple(ids[start : start + cut])
            if start % 3 == 0:  # a draft that is rejected, and its rows overwritten
                wrong = tuple((token_id + 1) % 250 for token_id in ids[start : start + 6])
                model.forward(step(slot, start, *wrong))
            plan = [SequenceRows(slot, start, rows)]
            if other is not None:
                plan.append(SequenceRows(2, 0, (7, start % 250, 9)))
            outputs.append(model.forward(StepPlan(tuple(plan)))[: len(rows)].clone())
            start += len(rows)
        return torch.cat(outputs)

    alone = feed(0, [1])
    for slot, cuts, other in (
        (1, [2, 7, 1, 16, 3], None),
        (0, [exact_rows + 1], prompts[2]),
        (1, [40], prompts[1]),
    ):
        assert torch.equal(feed(slot, cuts, other), alone)


@pytest.mark.parametrize("num_rows", [8, 7, 6])
def test_steps_have_no_number_of_rows_whose_places_differ(
    target_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        product = make_linear(weight, bias)

        def multiply(x: torch.Tensor) -> torch.Tensor:  # a kernel of its own for the last row
            result = product(x)
            if x.shape[0] == 7:
                result[6] *= 1 + 2**-20
            return result

        return multiply

    def fitting(exact_rows: int) -> int:
        return _exact_runner(load_small(target_checkpoint, exact_rows=exact_rows))._num_rows

    found = fitting(num_rows)
    monkeypatch.setattr(resolve, "make_linear", make)
    assert fitting(num_rows) == (fitting(6) if found == 7 else found)


def test_attention_counts_as_well(
    target_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_cache = SequencePart.read_cache

    def read(part: SequencePart, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        result = read_cache(part, query, layer, scaling)
        result[2:] *= 1 + 2**-20  # which rounding to bfloat16 mostly hides
        return result

    monkeypatch.setattr(SequencePart, "read_cache", read)
    monkeypatch.setattr("hippo.models.loading.resolve.cache_dtype", lambda *_: torch.float32)
    model = load_small(target_checkpoint, dtype="bfloat16", exact_rows=8)
    assert _exact_runner(model)._num_rows == 2
    assert "steps of 2 rows instead of 8 (--deterministic-rows)" in caplog.text


def test_logits_that_are_no_numbers_leave_one_row(target_checkpoint: Path) -> None:
    model = load_small(target_checkpoint, exact_rows=4)
    runner = _exact_runner(model)
    with torch.inference_mode():
        model.embedding[1] = torch.nan
        runner.fit_rows(model._rotary_table)
    assert runner._num_rows == 1


def _exact_runner(model: CachedModel) -> ExactRunner:
    assert isinstance(model._fixed, ExactRunner)
    return model._fixed


def test_heads_may_be_wider_than_their_share_of_a_row(qwen3_checkpoint: Path) -> None:
    outputs = []
    for exact_rows in (None, 5):
        model = load_small(qwen3_checkpoint, exact_rows=exact_rows)
        prefill(model, 0, prepare(model, user(0, "what?"), clip()))
        alone = torch.cat([model.forward(step(0, row, row + 1)).clone() for row in range(12)])
        outputs += [alone, model.forward(step(0, 0, *range(1, 13)))]
    for found in outputs[1:]:
        assert_close(found, outputs[0])
    assert torch.equal(outputs[2], outputs[3])


@pytest.mark.parametrize("num_left", [1, 3, 9])
def test_a_slot_can_be_filled_to_its_last_place(
    both: Both, exact: CachedModel, num_left: int
) -> None:
    ids = [index % 200 + 1 for index in range(CONTEXT - both.prompts[0].length)]
    both.prefill(exact, 0, 0)
    both.agree(exact, step(0, 0, *ids[:-num_left]))
    both.agree(exact, step(0, len(ids) - num_left, *ids[-num_left:]))
    for model in (both.ordinary, exact):
        with pytest.raises(ContextLengthError):
            model.forward(step(0, len(ids) - 1, 1, 2))


def test_what_a_failed_sequence_left_in_a_slot_does_no_harm(
    exact: CachedModel, prompts: list[Prompt]
) -> None:
    prefill(exact, 0, prompts[0])
    expected = exact.forward(step(0, 0, *range(1, 20))).clone()
    for layer in exact._cache.slot(0):
        layer.fill_(torch.nan)
    prefill(exact, 0, prompts[0])
    assert torch.equal(exact.forward(step(0, 0, *range(1, 20))), expected)
