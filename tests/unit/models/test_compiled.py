"""Steps through compiled layers give what ordinary steps give, or there are none."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.errors import ModelLoadError
from hippo.models import compiled, compiled_packages, linear
from hippo.models.base import Prompt, SequenceRows, StepPlan, VideoLanguageModel
from hippo.models.compiled import CompiledSteps
from hippo.models.compiled_layer import LayerSpec, Run
from hippo.models.family import CachedModel
from hippo.models.linear import has_half_linear
from hippo.models.loading import load_model
from tests.support.reference import clip, prefill, prepare, user

pytestmark = pytest.mark.timeout(400)  # a compiler runs before the first test

CONTEXT = 512  # that of tests/integration/test_compiled.py, for which nothing is compiled anew
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_slots": 3, "max_context_length": CONTEXT}


def _load(folder: Path, **changes: Any) -> VideoLanguageModel:
    return load_model(str(folder), **{**OPTIONS, **changes})


def _steps(model: VideoLanguageModel) -> CompiledSteps | None:
    assert isinstance(model, CachedModel)
    return model.compiled


@pytest.fixture(scope="module")
def ordinary(target_checkpoint: Path) -> VideoLanguageModel:
    return _load(target_checkpoint)


@pytest.fixture(scope="module")
def fast(target_checkpoint: Path, compile_folder: Path) -> VideoLanguageModel:
    return _load(target_checkpoint, compile_folder=compile_folder)


@pytest.fixture(scope="module")
def prompts(ordinary: VideoLanguageModel) -> list[Prompt]:
    return [
        prepare(ordinary, user(0, "what is in the thing?"), clip()),
        prepare(ordinary, user("and another thing")),
    ]


def _plan(slot: int, start: int, *ids: int) -> StepPlan:
    return StepPlan((SequenceRows(slot, start, ids),))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_compiled_steps_equal_ordinary_ones_whatever_is_fed_and_rolled_back(
    ordinary: VideoLanguageModel,
    fast: VideoLanguageModel,
    prompts: list[Prompt],
    data: st.DataObject,
) -> None:
    steps = _steps(fast)
    assert steps is not None
    start = 0
    for model in (ordinary, fast):
        for slot, prompt in enumerate(prompts):
            prefill(model, slot, prompt)
    for _ in range(data.draw(st.integers(1, 6))):
        ids = data.draw(st.lists(st.integers(1, 250), min_size=1, max_size=36))
        rows = [SequenceRows(1, start, tuple(ids))]
        if data.draw(st.booleans()):
            rows.append(SequenceRows(0, 0, tuple(ids[:3])))
        plan = StepPlan(tuple(rows))
        expected, actual = ordinary.forward(plan), fast.forward(plan)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)
        start = data.draw(st.integers(0, start + len(ids)))


@pytest.mark.skipif(not has_half_linear(), reason="this torch has no fbgemm")
def test_layers_with_float16_weights_are_compiled_as_well(
    target_checkpoint: Path, compile_folder: Path, prompts: list[Prompt]
) -> None:
    steps = _check_compiled(target_checkpoint, compile_folder, prompts[0], dtype="float16")
    assert set(steps.spec.forms) == {"half"}


@pytest.mark.parametrize("has_tiles", [True, False])
def test_bfloat16_layers_are_compiled_for_either_cache(
    target_checkpoint: Path,
    compile_folder: Path,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    has_tiles: bool,
) -> None:
    """Whatever this processor has: torch computes both."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_tiles})
    steps = _check_compiled(
        target_checkpoint, compile_folder, prompts[0], tolerance=8e-2, dtype="bfloat16"
    )
    assert steps.spec.cache_dtype == ("bfloat16" if has_tiles else "float32")


@pytest.mark.parametrize("is_bias_packed", [True, False])
def test_layers_with_weights_in_two_forms_are_compiled_as_well(
    target_checkpoint: Path,
    compile_folder: Path,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    is_bias_packed: bool,
) -> None:
    """As those of larger models on an Intel processor; here all others are small enough, and on
    another processor none is."""
    monkeypatch.setattr(linear, "_has_fast_mkl", lambda: True)
    monkeypatch.setattr(linear, "_MOST_TRANSPOSED_BYTES", 20_000 if is_bias_packed else 40_000)
    forms = _check_compiled(target_checkpoint, compile_folder, prompts[0]).spec.forms
    assert forms[0] == ("packed" if is_bias_packed else "transposed")
    assert set(forms[1:]) == {"packed", "transposed"}


def _check_compiled(
    folder: Path, kept: Path, prompt: Prompt, *, tolerance: float = 5e-5, **changes: Any
) -> CompiledSteps:
    """The compiled steps, which give what ordinary ones do."""
    ordinary = _load(folder, **changes)
    fast = _load(folder, compile_folder=kept, **changes)
    steps = _steps(fast)
    assert _steps(ordinary) is None
    assert steps is not None
    outputs = []
    for model in (ordinary, fast):
        prefill(model, 0, prompt)
        plans = (_plan(0, 0, 7), _plan(0, 1, *range(1, 33)), _plan(0, 9, 4, 5))
        outputs.append(torch.cat([model.forward(plan) for plan in plans]))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2 * tolerance, atol=tolerance)
    return steps


def test_one_sequence_with_few_rows_runs_compiled_and_the_rest_as_ever(
    fast: VideoLanguageModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _steps(fast)
    assert steps is not None
    counted: list[int] = []
    forward = steps.forward

    def counting(rows: Any) -> torch.Tensor:
        counted.append(len(rows.token_ids))
        return forward(rows)

    monkeypatch.setattr(steps, "forward", counting)
    for slot, prompt in enumerate(prompts):
        prefill(fast, slot, prompt)
    for count in (1, 2, 32, 33):
        fast.forward(_plan(0, 0, *range(1, count + 1)))
    fast.forward(StepPlan((SequenceRows(0, 0, (1,)), SequenceRows(1, 0, (1,)))))
    assert counted == [1, 2, 32]


def test_a_slot_can_be_filled_to_its_last_place(
    ordinary: VideoLanguageModel, fast: VideoLanguageModel, prompts: list[Prompt]
) -> None:
    room = CONTEXT - prompts[0].length
    outputs = []
    for model in (ordinary, fast):
        prefill(model, 0, prompts[0])
        model.forward(_plan(0, 0, *[index % 200 + 1 for index in range(room - 3)]))
        tail = [model.forward(_plan(0, room - 3 + index, 7 + index)) for index in range(3)]
        outputs.append(torch.cat(tail))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=5e-5)


def test_what_was_compiled_is_loaded_at_the_next_start(
    fast: VideoLanguageModel,
    draft_checkpoint: Path,
    compile_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the draft as well, whose layers are as the target's."""
    monkeypatch.setattr(compiled_packages, "compile_layer", _no_compiler)
    assert _steps(_load(draft_checkpoint, compile_folder=compile_folder)) is not None


class Compiler:
    """In place of the real one: takes the package that was made before."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.num_calls = 0
        self._folder = folder

    def copy(self, goal: Path) -> str:
        return str(shutil.copy(self._folder / self.name, goal))

    def __call__(self, _spec: object, path: Path) -> str:
        self.num_calls += 1
        return self.copy(path)


@pytest.fixture
def compiler(
    fast: VideoLanguageModel, compile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Compiler:
    steps = _steps(fast)
    assert steps is not None
    compiler = Compiler(compile_folder, steps.spec.name())
    monkeypatch.setattr(compiled_packages, "compile_layer", compiler)
    return compiler


def test_a_damaged_package_is_made_anew(
    compiler: Compiler, target_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / compiler.name).write_bytes(b"half a")
    assert _steps(_load(target_checkpoint, compile_folder=tmp_path)) is not None
    assert compiler.num_calls == 1


def _no_compiler(*_args: Any, **_kwargs: Any) -> str:
    raise RuntimeError("a compiler was called")


@pytest.mark.parametrize("must_compile", [True, False])
def test_without_a_compiler_steps_run_as_ever(
    target_checkpoint: Path,
    ordinary: VideoLanguageModel,
    prompts: list[Prompt],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    must_compile: bool,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with caplog.at_level(logging.INFO, logger="hippo.models.compiled"):
        model = _load(target_checkpoint, compile_folder=tmp_path, must_compile=must_compile)
    assert _steps(model) is None
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if must_compile else logging.INFO)
    assert "steps are not compiled: RuntimeError: no C++ compiler" in record.getMessage()
    for one in (ordinary, model):
        prefill(one, 0, prompts[0])
    assert torch.equal(model.forward(_plan(0, 0, 3, 4)), ordinary.forward(_plan(0, 0, 3, 4)))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_compiled_layers_that_give_something_else_are_not_used(
    target_checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
) -> None:
    def wrong(*_args: Any) -> Run:
        return lambda tensors: [tensors[0] * factor]

    monkeypatch.setattr(compiled, "load_kept", wrong)
    with caplog.at_level(logging.WARNING, logger="hippo"):
        assert _steps(_load(target_checkpoint, compile_folder=tmp_path)) is None
    assert "differ from the ordinary ones" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exact_rows": 8}, "--deterministic exclude each other"),
        ({"is_fused": False}, "as they are cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    target_checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        _load(target_checkpoint, compile_folder=tmp_path, **changes)
    loaded = _load(target_checkpoint, compile_folder=tmp_path, must_compile=False, **changes)
    assert _steps(loaded) is None


def test_what_another_service_makes_is_waited_for(
    compiler: Compiler, target_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = contextlib.ExitStack()
    other.enter_context(compiled_packages._making(tmp_path / compiler.name, 1.0))
    locked = compiled_packages._locked
    refusals: list[object] = []

    def the_other_is_ready_when_it_was_asked_for(file: IO[str]) -> bool:
        if is_ours := locked(file):
            return is_ours
        refusals.append(file)
        compiler.copy(tmp_path / compiler.name)
        other.close()
        return False

    monkeypatch.setattr(compiled_packages, "_locked", the_other_is_ready_when_it_was_asked_for)
    assert _steps(_load(target_checkpoint, compile_folder=tmp_path)) is not None
    assert len(refusals) == 1
    assert not compiler.num_calls
    assert {path.name for path in tmp_path.iterdir()} == {compiler.name}


def test_what_another_service_never_finishes_is_made_here(
    compiler: Compiler, fast: VideoLanguageModel, tmp_path: Path
) -> None:
    steps = _steps(fast)
    assert steps is not None
    with compiled_packages._making(tmp_path / compiler.name, 1.0):
        assert compiled_packages.make_package(steps.spec, tmp_path, patience_s=0.3).exists()
    assert compiler.num_calls == 1


def test_what_a_process_left_that_was_ended_is_removed_by_the_next(
    compiler: Compiler, fast: VideoLanguageModel, tmp_path: Path
) -> None:
    steps = _steps(fast)
    assert steps is not None
    (tmp_path / f".making-{Path(compiler.name).stem}-abc").mkdir()
    (tmp_path / Path(compiler.name).with_suffix(".lock")).touch()
    compiled_packages.make_package(steps.spec, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [compiler.name]


def test_packages_that_are_not_used_any_more_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_packages, "_MOST_KEPT", 3)
    for age in range(6):
        package = tmp_path / f"layer-{age}.pt2"
        package.write_bytes(b"")
        os.utime(package, (1e9 - age, 1e9 - age))
    (tmp_path / "of-somebody-else.pt2").write_bytes(b"")
    for name in ("left", "in-use"):
        (tmp_path / f".making-{name}").mkdir()
        (tmp_path / f"layer-{name}.lock").touch()
    for name in (".making-left", "layer-left.lock"):
        os.utime(tmp_path / name, (1e9, 1e9))
    compiled_packages._sweep(tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir())
    packages = [f"layer-{age}.pt2" for age in range(3)]
    assert kept == [".making-in-use", *packages, "layer-in-use.lock", "of-somebody-else.pt2"]


def test_what_is_not_kept_yet_can_be_left_for_later(
    compiler: Compiler,
    target_checkpoint: Path,
    ordinary: VideoLanguageModel,
    prompts: list[Prompt],
    tmp_path: Path,
) -> None:
    later = {"compile_folder": tmp_path, "waits_for_code": False}
    model = _load(target_checkpoint, **later)
    steps = _steps(model)
    assert steps is not None and not steps.has_code and not compiler.num_calls
    for one in (ordinary, model):
        prefill(one, 0, prompts[0])
    assert torch.equal(model.forward(_plan(0, 0, 3, 4)), ordinary.forward(_plan(0, 0, 3, 4)))
    compiler.copy(tmp_path / compiler.name)
    kept = _steps(_load(target_checkpoint, **later))
    assert kept is not None and kept.has_code


def test_the_check_leaves_the_cache_as_it_was(
    fast: VideoLanguageModel, prompts: list[Prompt], compile_folder: Path
) -> None:
    """It may be made while a sequence has the slot."""
    steps = _steps(fast)
    assert steps is not None and isinstance(fast, CachedModel)
    prefill(fast, 0, prompts[0])
    before = [layer.clone() for layer in fast._cache.stretch(0, CONTEXT)]
    run_layer = compiled_packages.load_kept(steps.spec, compile_folder)
    assert run_layer is not None

    def is_as_before() -> bool:
        after = fast._cache.stretch(0, CONTEXT)
        return all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

    assert 0 < max(steps.difference(run_layer, num_rows) for num_rows in (1, 2, 7, 32)) < 1e-4
    assert is_as_before()

    def broken(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        run_layer(tensors)
        raise RuntimeError("it is broken")

    with pytest.raises(RuntimeError, match="it is broken"):
        steps.difference(broken, 7)
    assert is_as_before()


def test_code_that_writes_no_cache_is_found_out(
    fast: VideoLanguageModel, compile_folder: Path
) -> None:
    steps = _steps(fast)
    assert steps is not None
    run_layer = compiled_packages.load_kept(steps.spec, compile_folder)
    assert run_layer is not None

    def forgetful(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        hidden, seen, *rest = tensors
        other = torch.empty_strided(seen.shape, seen.stride()).copy_(seen)
        return run_layer([hidden, other, *rest])

    assert steps.difference(forgetful, 7) > 0.1


def test_a_layers_description_passes_to_another_process(fast: VideoLanguageModel) -> None:
    steps = _steps(fast)
    assert steps is not None
    assert LayerSpec.from_json(steps.spec.to_json()) == steps.spec
