"""Steps of fixed shape give what ordinary steps give; a row's bits do not depend on the rest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.config import SettingsError
from hippo.errors import ContextLengthError
from hippo.models import fixed as fixed_module
from hippo.models.base import DecodedMedia, Prompt, SequenceRows, StepPlan, VideoLanguageModel
from hippo.models.family import CachedModel
from hippo.models.fixed import CAPTURED_ROWS, FixedRunner, captured_stretch, split_rows, stretch
from hippo.models.graphs import CudaGraphs, Replay
from hippo.models.linear import has_half_linear
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from tests.support.graphs import RecordedGraphs
from tests.support.reference import clip, prefill, prepare, step, user

CONTEXT = 600  # two stretches, and a last one that is no multiple
DTYPES = (
    "float32",
    "bfloat16",
    pytest.param(
        "float16",
        marks=pytest.mark.skipif(not has_half_linear(), reason="this torch has no fbgemm"),
    ),
)


def _load(folder: Path, **changes: Any) -> VideoLanguageModel:
    options: dict[str, Any] = {"dtype": "float32", "num_slots": 3, "max_context_length": CONTEXT}
    return load_model(LoadPlan(str(folder), **{**options, **changes}))


@pytest.fixture(scope="module")
def ordinary(target_checkpoint: Path) -> VideoLanguageModel:
    return _load(target_checkpoint)


@pytest.fixture(scope="module")
def exact(target_checkpoint: Path) -> VideoLanguageModel:
    return _load(target_checkpoint, exact_rows=5)


@pytest.fixture(scope="module")
def prompts(ordinary: VideoLanguageModel) -> list[Prompt]:
    texts = ("what is in the thing?", "and another thing", "what?")
    clips: tuple[list[DecodedMedia], ...] = ([clip()], [], [clip(num_frames=3, size=112, seed=1)])
    return [
        prepare(ordinary, user(*range(len(media)), text), *media)
        for text, media in zip(texts, clips, strict=True)
    ]


def _graphed(model: VideoLanguageModel, graphs: Any) -> FixedRunner:
    """Gives the model, of which only the cache's spare places must be there, steps with graphs."""
    assert isinstance(model, CachedModel)
    model._fixed = FixedRunner(
        model._stack, model._cache, model.embedding, capture=graphs.capture_graph
    )
    return model._fixed


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
@settings(max_examples=25, deadline=None)
def test_steps_of_fixed_shape_equal_ordinary_ones(
    ordinary: VideoLanguageModel,
    exact: VideoLanguageModel,
    prompts: list[Prompt],
    lengths: list[int],
    data: st.DataObject,
) -> None:
    rows = []
    for slot, length in enumerate(lengths):
        ids = data.draw(st.lists(st.integers(1, 250), min_size=length, max_size=length))
        start = data.draw(st.integers(0, length - 1))
        for model in (ordinary, exact):
            prefill(model, slot, prompts[slot])
            model.forward(step(slot, 0, *ids))  # to be rolled back to ``start``
        rows.append(SequenceRows(slot, start, tuple(reversed(ids[start:]))))
    expected, actual = (model.forward(StepPlan(tuple(rows))) for model in (ordinary, exact))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact_rows", [3, 8])
def test_a_tokens_logits_have_the_same_bits_however_it_was_fed(
    target_checkpoint: Path,
    prompts: list[Prompt],
    dtype: str,
    exact_rows: int,
) -> None:
    model = _load(target_checkpoint, dtype=dtype, exact_rows=exact_rows)
    generator = torch.Generator().manual_seed(1)
    num_tokens = CONTEXT - prompts[0].length
    ids: list[int] = torch.randint(1, 250, (num_tokens,), generator=generator).tolist()

    def feed(slot: int, cuts: list[int], other: Prompt | None = None) -> torch.Tensor:
        prefill(model, slot, prompts[0])
        outputs, start = [], 0
        if other is not None:
            prefill(model, 2, other)
        for cut in cuts:
            rows = tuple(ids[start : start + cut])
            if not rows:
                break
            if start % 3 == 0:  # a draft that is rejected, and its rows overwritten
                wrong = tuple((token_id + 1) % 250 for token_id in ids[start : start + 6])
                model.forward(step(slot, start, *wrong))
            plan = [SequenceRows(slot, start, rows)]
            if other is not None:
                plan.append(SequenceRows(2, 0, (7, start % 250, 9)))
            outputs.append(model.forward(StepPlan(tuple(plan)))[: len(rows)].clone())
            start += cut
        return torch.cat(outputs)

    alone = feed(0, [1] * num_tokens)
    for slot, cuts, other in (
        (1, [2, 7, 1, 16, 3] * 120, None),
        (0, [exact_rows + 1] * num_tokens, prompts[2]),
        (1, [40] * num_tokens, prompts[1]),
    ):
        assert torch.equal(feed(slot, cuts, other), alone)


@pytest.mark.parametrize("num_left", [1, 3, 9])
def test_a_slot_can_be_filled_to_its_last_place(
    ordinary: VideoLanguageModel, exact: VideoLanguageModel, prompts: list[Prompt], num_left: int
) -> None:
    ids = [index % 200 + 1 for index in range(CONTEXT - prompts[0].length)]
    outputs = []
    for model in (ordinary, exact):
        prefill(model, 0, prompts[0])
        model.forward(step(0, 0, *ids[:-num_left]))
        outputs.append(model.forward(step(0, len(ids) - num_left, *ids[-num_left:])))
        with pytest.raises(ContextLengthError):
            model.forward(step(0, len(ids) - 1, 1, 2))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=5e-5)


def test_what_a_failed_sequence_left_in_a_slot_does_no_harm(
    exact: VideoLanguageModel, prompts: list[Prompt]
) -> None:
    prefill(exact, 0, prompts[0])
    expected = exact.forward(step(0, 0, *range(1, 20))).clone()
    assert isinstance(exact, CachedModel)
    for layer in exact._cache.slot(0):
        layer.fill_(torch.nan)
    prefill(exact, 0, prompts[0])
    assert torch.equal(exact.forward(step(0, 0, *range(1, 20))), expected)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_replayed_steps_equal_ordinary_ones(
    ordinary: VideoLanguageModel,
    exact: VideoLanguageModel,
    prompts: list[Prompt],
    data: st.DataObject,
) -> None:
    graphs = RecordedGraphs()
    before = exact._fixed  # type: ignore[attr-defined]
    _graphed(exact, graphs)
    num_alone = start = 0
    try:
        for model in (ordinary, exact):
            for slot, prompt in enumerate(prompts):
                prefill(model, slot, prompt)
        for _ in range(data.draw(st.integers(1, 6))):
            ids = data.draw(st.lists(st.integers(1, 250), min_size=1, max_size=36))
            rows = [SequenceRows(0, start, tuple(ids))]
            if data.draw(st.booleans()):
                rows.append(SequenceRows(1, 0, tuple(ids[:3])))
            num_alone += len(rows) == 1 and len(ids) <= CAPTURED_ROWS[-1]
            plan = StepPlan(tuple(rows))
            expected, actual = ordinary.forward(plan), exact.forward(plan)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)
            start = data.draw(st.integers(0, start + len(ids)))
    finally:
        exact._fixed = before  # type: ignore[attr-defined]
    assert graphs.num_replays == num_alone + graphs.num_captured, "one more after each capture"
    assert graphs.num_captured <= num_alone


@given(st.integers(0, 4095), st.integers(1, 40_000))
def test_a_captured_stretch_is_of_few_lengths(index: int, capacity: int) -> None:
    index %= capacity
    num_tokens = captured_stretch(index, capacity)
    assert index < num_tokens
    assert num_tokens in (1024, 2048, 4096, capacity + -capacity % 16)


def test_all_shapes_are_captured_before_the_first_prompt(
    target_checkpoint: Path, ordinary: VideoLanguageModel, prompts: list[Prompt]
) -> None:
    model, graphs = _load(target_checkpoint, exact_rows=1), RecordedGraphs()
    static = _graphed(model, graphs)
    assert isinstance(model, CachedModel)
    num_shapes = 3 * len(CAPTURED_ROWS)  # of three slots, at one length: the whole
    assert list(model.capture_steps()) == list(range(1, num_shapes + 1))
    ids = tuple(range(1, 33))
    for one in (ordinary, model):
        prefill(one, 2, prompts[0])
    outputs = {1: set[int](), 32: set[int]()}
    for start in (0, 32, 64):
        for count in outputs:
            plan = step(2, start, *ids[:count])
            assert static.covers([model._place_rows(plan.sequences[0])])
            found = model.forward(plan)
            outputs[count].add(found.data_ptr())
            torch.testing.assert_close(found, ordinary.forward(plan), rtol=1e-4, atol=5e-5)
    assert graphs.num_captured == num_shapes
    assert len(outputs[1] | outputs[32]) == 1, "graphs keep no logits of their own"


def test_what_there_is_no_room_to_capture_runs_in_the_ordinary_way(
    target_checkpoint: Path,
    ordinary: VideoLanguageModel,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fixed_module, "_MAX_KEPT", 2)
    monkeypatch.setattr(fixed_module, "_CAPTURED_STRETCHES", (256, 512))
    model, graphs = _load(target_checkpoint, exact_rows=1), RecordedGraphs()
    _graphed(model, graphs)
    for one in (ordinary, model):
        for slot in range(3):
            prefill(one, slot, prompts[0])
        one.forward(step(0, 0, *range(1, 251), *range(1, 181)))
    for plan in (step(2, 0, 5), step(2, 1, 6, 7), step(1, 0, 5), step(0, 428, 5, 6)):
        torch.testing.assert_close(
            model.forward(plan), ordinary.forward(plan), rtol=1e-4, atol=5e-5
        )
    assert graphs.num_captured == 2


def test_after_a_capture_that_fails_work_goes_where_it_went_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch leaves the capture's stream only when the capture ends well."""
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
        "graph_pool_handle": lambda: None,
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
        CudaGraphs(torch.device("cuda")).capture_graph(lambda: torch.zeros(1))
    assert streams[-1].name == "usual"


class _Refusing:
    def capture_graph(self, run: Callable[[], torch.Tensor]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")


class _Wrong:
    def capture_graph(self, run: Callable[[], torch.Tensor]) -> Replay:
        output = run() * 1.01
        return lambda: output


class _Undefined:
    def capture_graph(self, run: Callable[[], torch.Tensor]) -> Replay:
        output = run() * torch.nan
        return lambda: output


@pytest.mark.parametrize(
    ("graphs", "reason"),
    [(_Refusing(), "not permitted"), (_Wrong(), "differs by"), (_Undefined(), "differs by")],
)
def test_without_graphs_that_work_steps_run_as_they_are(
    target_checkpoint: Path,
    ordinary: VideoLanguageModel,
    prompts: list[Prompt],
    caplog: pytest.LogCaptureFixture,
    graphs: Any,
    reason: str,
) -> None:
    model = _load(target_checkpoint, exact_rows=1)  # for its spare places
    static = _graphed(model, graphs)
    with caplog.at_level(logging.WARNING):
        for one in (ordinary, model):
            prefill(one, 0, prompts[0])
        for start in range(3):
            plan = step(0, start, 3 + start)
            torch.testing.assert_close(
                model.forward(plan), ordinary.forward(plan), rtol=1e-4, atol=5e-5
            )
    assert not static.covers(()), "the ordinary path takes over"
    assert list(static.capture_all(torch.empty(0))) == []
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "CUDA graphs are off" in messages[0] and reason in messages[0]


def test_graphs_of_exact_steps_keep_their_bits(
    target_checkpoint: Path, prompts: list[Prompt]
) -> None:
    model = _load(target_checkpoint, exact_rows=4, dtype="bfloat16")
    assert isinstance(model, CachedModel)
    ids = tuple(range(1, 31))
    prefill(model, 0, prompts[0])
    expected = model.forward(step(0, 0, *ids)).clone()
    graphs = RecordedGraphs()
    model._fixed = FixedRunner(
        model._stack,
        model._cache,
        model.embedding,
        exact_rows=4,
        capture=graphs.capture_graph,
    )
    for cut in (1, 3, 30):
        prefill(model, 0, prompts[0])
        parts = [
            model.forward(step(0, start, *ids[start : start + cut])).clone()
            for start in range(0, len(ids), cut)
        ]
        assert torch.equal(torch.cat(parts), expected)
    assert graphs.num_captured == 1 and graphs.num_replays > 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda_graphs": "on"}, "--cuda-graphs on needs --device cuda"),
        ({"cuda_graphs": "always"}, "use auto, on or off"),
        ({"exact_rows": 0}, "must be 1 to 32"),
        ({"exact_rows": 33}, "must be 1 to 32"),
    ],
)
def test_steps_that_cannot_be_are_refused(
    target_checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        _load(target_checkpoint, **changes)
