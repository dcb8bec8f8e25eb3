"""The benchmark of real shapes runs the services' own model code, here with a layer on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_shapes
from hippo.cli.stack import BUNDLED_PAIR
from hippo.sizes import find_shape, shape_of


def test_steps_and_prefills_of_a_model_cut_to_one_layer_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    gpu_shapes.main(
        ["--models", str(BUNDLED_PAIR / "draft"), "--device", "cpu", "--dtype", "float32",
         "--layers", "1", "--contexts", "40,80", "--rows", "1,3", "--seconds", "0",
         "--bandwidth", "10", "--out", str(out)]
    )  # fmt: skip
    (model,) = json.loads(out.read_text())["models"]
    assert model["layers"] == 1
    assert [(step["context"], step["rows"]) for step in model["steps"]] == [
        (40, 1), (40, 3), (80, 1), (80, 3),
    ]  # fmt: skip
    shape = shape_of(
        "m", gpu_shapes.small(gpu_shapes.configuration(str(BUNDLED_PAIR / "draft")), 1)
    )
    read = 4 * (shape.num_shared_parameters + shape.hidden_size * 576)
    read += shape.cache_bytes(80, bytes_each=4)
    assert model["steps"][-1]["floor_ms"] == pytest.approx(1e3 * read / 10e9)
    title = " ".join(capsys.readouterr().out.split())  # a long path wraps it
    assert "only 1 layers" in title


@pytest.mark.parametrize("size", ["3B", "7B", "32B"])
def test_public_shapes_are_built_with_as_many_parameters_as_they_have(size: str) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    name = f"Qwen/Qwen2.5-VL-{size}-Instruct"
    config = gpu_shapes.configuration(name)
    config.pop("model_type")
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config))
    model.tie_weights()
    text: Any = model.config.text_config
    assert sum(text.rope_parameters["mrope_section"]) == text.hidden_size // (
        2 * text.num_attention_heads
    )
    assert sum(weight.numel() for weight in model.parameters()) == find_shape(name).num_parameters


def test_a_model_that_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_shapes, "available_bytes", lambda device: 1000)
    gpu_shapes.main(
        ["--models", "Qwen/Qwen2.5-VL-32B-Instruct", "--device", "cpu", "--bandwidth", "10",
         "--out", str(tmp_path / "out.json")]
    )  # fmt: skip
    assert "left out" in capsys.readouterr().out
