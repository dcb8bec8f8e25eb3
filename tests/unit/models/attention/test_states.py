"""States of delta nets: blocks, rollbacks and replays give the bits of single steps, float32."""

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.catalog.shapes import find_states
from hippo.catalog.states import StateShape
from hippo.errors import HippoError
from hippo.models.attention import states as module
from hippo.models.attention.states import LayerStates, State, StateRows, zero_state
from hippo.models.loading.resolve import import_transformers
from hippo.models.runners.delta import DeltaLayer
from hippo.models.runners.delta_rule import DeltaRule
from tests.support.models.families import write_family
from tests.support.models.pairs import load

LOG = 12
CONTENTS = 40  # different rows
PROMPT = 9
SHAPE = StateShape(
    num_layers=1, num_heads=4, key_dim=16, value_dim=16, input_width=128, num_inputs=3
)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> DeltaLayer:
    model = load(write_family(tmp_path_factory.mktemp("hybrid") / "tiny", "qwen3_5"))
    first = model._stack._layers[0]
    assert isinstance(first, DeltaLayer) and model._cache.shape.states is not None
    assert SHAPE.log_width == model._cache.shape.states.log_width
    return first


@pytest.fixture(autouse=True)
def short_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_ROWS", LOG)


def empty_states(num_slots: int = 1) -> LayerStates:
    dtype, cpu = torch.float32, torch.device("cpu")
    zero = zero_state(SHAPE, dtype, cpu)
    return LayerStates(SHAPE, num_slots=num_slots, dtype=dtype, device=cpu, zero=zero)


def inputs() -> torch.Tensor:
    return torch.randn(CONTENTS, SHAPE.log_width, generator=torch.Generator().manual_seed(0))


def prompt(layer: DeltaLayer, held: LayerStates, *marks: int, slot: int = 0) -> State:
    rows = StateRows(slot, 0, PROMPT, 0, marks=marks, is_first=True)
    with torch.inference_mode():
        layer._run(inputs()[:PROMPT], rows, held)
    return held.nearest(slot, PROMPT)[0]


def run(
    layer: DeltaLayer, held: LayerStates, start: int, contents: list[int], least: int
) -> torch.Tensor:
    rows = StateRows(0, 0, len(contents), start, least)
    with torch.inference_mode():
        return layer._run(inputs()[contents], rows, held)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_blocks_and_rollbacks_of_any_lengths_have_the_bits_of_single_steps(
    layer: DeltaLayer, data: st.DataObject
) -> None:
    held = empty_states()
    state = prompt(layer, held, 4, 7)
    before = State(state.matrix.clone(), state.inputs.clone())
    path: list[int] = []
    least = 0
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(least, len(path)))
        least = data.draw(st.integers(least, start))
        most = LOG - (start - least)
        some = st.lists(st.integers(0, CONTENTS - 1), min_size=1, max_size=most)
        block = data.draw(some)
        path = path[:start] + block
        read = run(layer, held, PROMPT + start, block, PROMPT + least)
        singles, state = [], before
        with torch.inference_mode():
            for content in path:
                one, state = layer._rule.run_rows(inputs()[content : content + 1], state)
                singles.append(one)
        assert torch.equal(read, torch.cat(singles[start:]))
        found = layer._state_at(held, 0, PROMPT + len(path))
        assert torch.equal(found.matrix, state.matrix)
        assert torch.equal(found.inputs, state.inputs)
    assert held.reaches(0, 4) and held.reaches(0, 7) and not held.reaches(0, 5)


def test_a_block_longer_than_the_log_has_the_bits_of_single_steps(layer: DeltaLayer) -> None:
    contents = list(range(CONTENTS))
    held, other = empty_states(), empty_states()
    prompt(layer, held)
    prompt(layer, other)
    read = run(layer, held, PROMPT, contents, PROMPT)
    single = [run(layer, other, PROMPT + i, [i], PROMPT + i) for i in contents]
    assert torch.equal(read, torch.cat(single))
    with pytest.raises(HippoError, match="no more than 12 tokens may be drafted ahead"):
        run(layer, held, PROMPT + 3, [1], PROMPT)


def test_a_prompt_in_pieces_keeps_the_states_of_its_marks(layer: DeltaLayer) -> None:
    whole, parts = empty_states(), empty_states()
    prompt(layer, whole, 4, 7)
    with torch.inference_mode():
        for start, end in ((0, 4), (4, 6), (6, 9)):
            rows = StateRows(0, 0, end - start, start, marks=(4, 7), is_first=start == 0)
            layer._run(inputs()[start:end], rows, parts)
    for place in (4, 7, PROMPT):
        one, other = whole.nearest(0, place)[0], parts.nearest(0, place)[0]
        torch.testing.assert_close(one.matrix, other.matrix)
        assert torch.equal(one.inputs, other.inputs)
    assert [place for place in range(1, PROMPT + 1) if whole.reaches(0, place)] == [4, 7, PROMPT]


def test_a_prompt_that_goes_on_from_a_mark_equals_the_whole(layer: DeltaLayer) -> None:
    held = empty_states()
    expected = prompt(layer, held, 4).matrix.clone()
    run(layer, held, PROMPT, [1, 2, 3], PROMPT)
    rows = StateRows(0, 0, PROMPT - 4, 4, marks=(4,), is_first=True)
    with torch.inference_mode():
        layer._run(inputs()[4:PROMPT], rows, held)
    assert torch.equal(held.nearest(0, PROMPT)[0].matrix, expected)
    assert not held.reaches(0, PROMPT + 1)


def test_a_copy_has_the_states_up_to_its_last_row(layer: DeltaLayer) -> None:
    held = empty_states(2)
    prompt(layer, held, 4, 7)
    run(layer, held, PROMPT, [1, 2, 3], PROMPT)
    with torch.inference_mode():
        for place in (7, PROMPT + 2):
            layer.copy_state(held, 0, 1, place)
            one, other = (layer._state_at(held, slot, place) for slot in (0, 1))
            assert torch.equal(one.matrix, other.matrix)
            assert held.reaches(1, 4) and not held.reaches(1, place + 1)
    assert held.reaches(0, PROMPT + 3)


@pytest.mark.parametrize(("num_heads", "num_rows"), [(32, 10), (48, 13)])
def test_threads_change_no_bits_at_published_widths(num_heads: int, num_rows: int) -> None:
    """Qwen3.5-9B's and 27B's layers; torch divides large tensors among threads anywhere."""
    transformers = import_transformers()
    config = transformers.Qwen3_5TextConfig(hidden_size=64, linear_num_value_heads=num_heads)
    modeling: Any = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    rule = DeltaRule(modeling.Qwen3_5GatedDeltaNet(config, 0))
    shape = find_states(config.to_dict())
    assert shape is not None and rule.input_width == shape.input_width
    state = zero_state(shape, torch.float32, torch.device("cpu"))
    rows = torch.randn(num_rows, shape.log_width, generator=torch.Generator().manual_seed(0))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch.inference_mode():
            read, together = rule.run_rows(rows, state)
            for index in range(num_rows):
                alone, state = rule.run_rows(rows[index : index + 1], state)
                assert torch.equal(alone[0], read[index])
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(state.matrix, together.matrix)
