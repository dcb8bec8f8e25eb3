"""Steps by CUDA graphs give what ordinary steps give, by one graph for all slots and lengths."""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.models.cached import CachedModel
from hippo.models.interface.base import SequenceRows, StepPlan
from hippo.models.interface.plan import MAX_GROUPED_ROWS
from hippo.models.runners import captured
from hippo.models.runners.captured import MOST_ROWS, CapturedRunner, CapturedShape, shapes_of
from hippo.models.runners.graphs import CudaGraphs, Replay
from tests.support.devices.flash_operator import flash_operator
from tests.support.devices.graphs import RecordedGraphs, runner_of
from tests.support.models.reference import prefill, step
from tests.unit.models.runners.conftest import CONTEXT, Both, load_small


@pytest.fixture(scope="module", autouse=True)
def operator() -> Iterator[None]:
    with flash_operator():
        yield


@functools.cache
def _with_spare_places(folder: Path, dtype: str) -> CachedModel:
    return load_small(folder, dtype=dtype, exact_rows=MAX_GROUPED_ROWS)


def _captured(
    folder: Path, capture: Any, *, exact_rows: int | None = None, dtype: str = "float32"
) -> tuple[CachedModel, CapturedRunner]:
    model = _with_spare_places(folder, dtype)
    model._fixed = runner = runner_of(model, capture, exact_rows=exact_rows)
    return model, runner


def test_shapes_are_few_and_bounded() -> None:
    shapes = shapes_of(32, 30_000)
    assert len(shapes) == len(set(shapes)) == 36
    assert shapes[0].num_rows == MOST_ROWS and shapes[-1] == CapturedShape(1, 1, 4096)
    assert CapturedShape(1, 1, 30_000) in shapes and CapturedShape(2, 1, 4096) not in shapes
    assert shapes_of(1, 4) == [CapturedShape(1, 2, 4), CapturedShape(1, 1, 4)]


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_replayed_steps_equal_ordinary_ones(both: Both, data: st.DataObject) -> None:
    graphs = RecordedGraphs()
    model, runner = _captured(both.folder, graphs.capture_graph)
    starts, num_covered = [0, 0, 0], 0
    for slot in range(3):
        both.prefill(model, slot, slot)
    for _ in range(data.draw(st.integers(1, 6))):
        rows = []
        for slot in data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]:
            ids = data.draw(st.lists(st.integers(1, 250), min_size=1, max_size=36))
            rows.append(SequenceRows(slot, starts[slot], tuple(ids)))
            starts[slot] = data.draw(st.integers(0, starts[slot] + len(ids)))
        num_covered += runner.covers([model._place_rows(each) for each in rows])
        both.agree(model, StepPlan(tuple(rows)))
    assert graphs.num_replays == num_covered + graphs.num_captured, "one more after each capture"


def test_all_shapes_are_captured_before_the_first_prompt(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = 200
    monkeypatch.setattr(captured, "_SHORT_PREFIX", short)
    graphs = RecordedGraphs()
    model, runner = _captured(both.folder, graphs.capture_graph)
    num_shapes = len(shapes_of(3, CONTEXT))
    assert list(model.capture_steps()) == list(range(1, num_shapes + 1))
    ids = tuple(range(1, 33))
    outputs = set()
    for slot in (2, 0):
        both.prefill(model, slot, 0)
        for start in (0, 32, 200, CONTEXT - both.prompts[0].length - 32):
            both.agree(model, step(slot, 0, *(ids * 20)[: start + 1]))
            for count in (1, 7, 32):
                plan = step(slot, start, *ids[:count])
                (placed,) = [model._place_rows(each) for each in plan.sequences]
                shape = runner._shape([placed])
                is_short = placed.start + (1 << (count - 1).bit_length()) <= short
                assert shape is not None and shape.capacity == (short if is_short else CONTEXT)
                outputs.add(model.forward(plan).data_ptr())
                both.agree(model, plan)
    assert graphs.num_captured == num_shapes, "none is made for a slot or a length"
    assert len(outputs) == 1, "graphs keep no logits of their own"


def test_padding_leaves_what_other_sequences_have_cached(both: Both) -> None:
    model, _ = _captured(both.folder, RecordedGraphs().capture_graph)
    for slot, prompt in enumerate(both.prompts):
        prefill(model, slot, prompt)
    data = model._cache._data
    before = data.clone()
    model.forward(StepPlan((SequenceRows(1, 0, (5, 6, 7)), SequenceRows(2, 0, (5,)))))
    model.forward(StepPlan(tuple(SequenceRows(slot, 0, (5,)) for slot in range(3))))
    for slot, prompt in enumerate(both.prompts):
        held = (slice(None), slot, ..., slice(prompt.length), slice(None))
        assert torch.equal(data[held], before[held])


def test_after_a_capture_that_fails_work_goes_where_it_went_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch leaves the capture's stream, and its allocator the graphs' pool, only when the capture
    ends well."""
    ended: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *where: ended.append(where))
    streams = [SimpleNamespace(name="usual", wait_stream=lambda _: None)]

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    @contextlib.contextmanager
    def capturing(_graph: Any, *, stream: Any, **_options: Any) -> Iterator[None]:
        streams.append(stream)
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    instead: dict[str, Any] = {
        "device": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 7),
        "current_stream": lambda: streams[-1],
        "Stream": lambda: SimpleNamespace(name="side", wait_stream=lambda _: None),
        "stream": on,
        "CUDAGraph": lambda: None,
        "graph": capturing,
        "set_stream": streams.append,
    }
    for name, function in instead.items():
        monkeypatch.setattr(torch.cuda, name, function)
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphs(torch.device("cuda:0")).capture_graph(lambda: torch.zeros(1))
    assert streams[-1].name == "usual" and ended == [(0, (0, 7))]


def _refusing(run: Callable[[], torch.Tensor]) -> Replay:
    raise RuntimeError("operation not permitted when stream is capturing")


def _wrong(run: Callable[[], torch.Tensor], factor: float = 1.01) -> Replay:
    return lambda: run() * factor


def _fixed(run: Callable[[], torch.Tensor]) -> Replay:
    """Always reads the tokens of the capture."""
    output = run().clone()
    return lambda: output


def _swapped(run: Any) -> Replay:
    """Reads the tokens of other slots."""
    ranges = run.__self__._ranges
    starts = ranges[: ranges.shape[0] // 2]

    def replay() -> torch.Tensor:
        starts.copy_(starts.flip(0))
        output: torch.Tensor = run().clone()
        starts.copy_(starts.flip(0))
        return output

    return replay


@pytest.mark.parametrize("capture", [_fixed, _swapped])
def test_a_graph_that_reads_other_tokens_is_found_before_the_first_prompt(
    target_checkpoint: Path, caplog: pytest.LogCaptureFixture, capture: Any
) -> None:
    _with_spare_places(target_checkpoint, "bfloat16")._cache._data.zero_()
    model, runner = _captured(target_checkpoint, capture, dtype="bfloat16")
    assert list(model.capture_steps()) == [] and runner._capture is None
    assert "differs by" in caplog.text


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (_refusing, "not permitted"),
        (_wrong, "differs by"),
        (functools.partial(_wrong, factor=torch.nan), "differs by"),
    ],
)
def test_without_graphs_that_work_steps_run_as_they_are(
    both: Both, caplog: pytest.LogCaptureFixture, capture: Any, reason: str
) -> None:
    model, runner = _captured(both.folder, capture)
    with caplog.at_level(logging.WARNING):
        both.prefill(model, 0, 0)
        for start in range(3):
            plan = step(0, start, 3 + start)
            both.agree(model, plan)
    assert not runner.covers([model._place_rows(plan.sequences[0])]), "the eager path takes over"
    assert list(model.capture_steps()) == []
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "CUDA graphs are off" in messages[0] and reason in messages[0]


def test_a_difference_within_the_dtypes_rounding_is_none(target_checkpoint: Path) -> None:
    """In bfloat16 a result that is one unit in the last place away is no other result."""
    model, runner = _captured(target_checkpoint, _wrong, dtype="bfloat16")
    assert list(itertools.islice(model.capture_steps(), 5)) == [1, 2, 3, 4, 5]
    assert runner._capture is not None


@pytest.mark.parametrize(("dtype", "num_rows"), [("float32", 4), ("bfloat16", 4), ("float32", 1)])
def test_a_tokens_logits_have_the_same_bits_however_it_was_fed(
    both: Both, dtype: str, num_rows: int
) -> None:
    graphs = RecordedGraphs()
    model, _ = _captured(both.folder, graphs.capture_graph, exact_rows=num_rows, dtype=dtype)
    assert list(model.capture_steps()) == [1]
    ids = tuple(range(1, 31))
    outputs = []
    for slot, cut in ((0, 1), (0, 3), (2, 30)):
        prefill(model, slot, both.prompts[0])
        plans = (step(slot, at, *ids[at : at + cut]) for at in range(0, len(ids), cut))
        outputs.append(torch.cat([model.forward(plan).clone() for plan in plans]))
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    plain = load_small(both.folder, exact_rows=num_rows, dtype=dtype)
    prefill(plain, 0, both.prompts[0])
    tolerance = {"float32": 1e-4, "bfloat16": 6e-2}[dtype]
    expected = plain.forward(step(0, 0, *ids))
    torch.testing.assert_close(outputs[0], expected, rtol=tolerance, atol=tolerance)
    assert graphs.num_captured == 1 and graphs.num_replays > 40
