"""Mixtures of experts: what is counted, refused and captured."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from hippo.catalog.public_models import PUBLIC_CONFIGS
from hippo.catalog.shapes import find_shape, shape_of
from hippo.catalog.sizes import Experts
from hippo.errors import ModelLoadError
from hippo.models.interface.plan import LoadPlan
from hippo.parallel.source import ParallelSource
from tests.support.devices.flash_operator import flash_operator
from tests.support.devices.graphs import RecordedGraphs, runner_of
from tests.support.models.pairs import load
from tests.support.models.quantized import add_config
from tests.support.models.reference import assert_close, clip, prefill, prepare, step, user

PUBLIC = "Qwen/Qwen3-VL-30B-A3B-Instruct"


@pytest.mark.parametrize(
    ("settings", "num_layers"),
    [({}, 48), ({"mlp_only_layers": [0, 47]}, 46), ({"decoder_sparse_step": 3}, 16)],
)
def test_layers_without_experts_are_counted_as_dense(
    settings: dict[str, Any], num_layers: int
) -> None:
    public = PUBLIC_CONFIGS[PUBLIC]
    shape = shape_of("m", {**public, "text_config": public["text_config"] | settings})
    assert shape.experts is not None and shape.experts.num_layers == num_layers
    assert shape.mlp_width == (0 if num_layers == 48 else 6144)
    all_experts = find_shape(PUBLIC)
    layer = 3 * 2048 * (6144 - 128 * 768)  # a dense one in place of experts
    change = (48 - num_layers) * layer
    assert shape.num_shared_parameters == all_experts.num_shared_parameters + change
    num_read = all_experts.num_read_parameters(1) + all_experts.num_head_parameters
    assert num_read == pytest.approx(3.0e9, rel=0.1)


def test_experts_beside_a_dense_layer_are_counted_in_transformers_own_form(
    experts_checkpoint: Path,
) -> None:
    shape = find_shape(str(experts_checkpoint))
    assert shape.experts == Experts(num_layers=2, num_experts=8, num_chosen=3, width=24)


@pytest.mark.parametrize(
    ("changes", "stored", "said"),
    [
        ({"quantization": "int8"}, None, "leave --quantization out"),
        ({"exact_rows": 8}, None, "leave --deterministic out"),
        (
            {},
            {"quant_method": "fp8", "fmt": "e4m3"},
            "use the form of the model that is not quantised",
        ),
    ],
)
def test_what_does_not_go_with_experts_is_refused(
    experts_checkpoint: Path,
    changes: dict[str, Any],
    stored: dict[str, Any] | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(experts_checkpoint, tmp_path / "copy"))
    if stored:
        add_config(folder, stored)
    monkeypatch.setattr("hippo.models.loading.pretrained.read_weights", None)  # not even begun
    with pytest.raises(ModelLoadError, match=said):
        load(folder, **changes)


def test_no_rank_is_started_for_experts(experts_checkpoint: Path) -> None:
    source = ParallelSource(LoadPlan(str(experts_checkpoint), tensor_parallel=2))
    with pytest.raises(ModelLoadError, match="leave --tensor-parallel out"):
        source.load(lambda stage, share: None)
    source.close()
    assert not find_shape(PUBLIC).can_divide(2)


def test_steps_with_experts_can_be_captured(
    experts_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay sees nothing of the host, so other tokens choose their own experts."""
    monkeypatch.setattr("hippo.models.loading.quantization.find_experts", lambda _: None)
    model = load(experts_checkpoint, exact_rows=32)  # for the spare places that graphs need
    graphs = RecordedGraphs()
    runner = runner_of(model, graphs.capture_graph)
    prefill(model, 0, prepare(model, user(0, "what is it?"), clip()))
    with flash_operator():
        for start in (0, 3, 6):
            plan = step(0, start, *range(5 + start, 8 + start))
            model._fixed = None
            expected = model.forward(plan).clone()
            model._fixed = runner
            assert_close(model.forward(plan), expected)
    assert (graphs.num_captured, graphs.num_replays) == (1, 4)
