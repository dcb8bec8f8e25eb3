"""Quantised checkpoints give the logits that transformers gives with the same weights."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hippo.models.loading import quantization as quantized
from hippo.types import Pruning, PruningStrategy
from tests.support.models import pairs
from tests.support.models.hub_forms import write_hub_form
from tests.support.models.pairs import assert_equal_to_target_only
from tests.support.models.quantized import FORMS, has_packages, write_quantized
from tests.support.models.reference import (
    Reference,
    answer,
    assert_close,
    clip,
    prefill,
    prepare,
    step,
    user,
)
from tests.support.running.services import toy_request

QWEN2 = "Qwen/Qwen2-VL-2B-Instruct"  # tied and in two files
QWEN = "Qwen/Qwen2.5-VL-72B-Instruct"
QWEN3 = "Qwen/Qwen3-VL-4B-Instruct"  # tied and in two files
LLAVA = "llava-hf/llava-onevision-qwen2-72b-ov-hf"
INTERNVL = "OpenGVLab/InternVL3_5-8B-HF"

REQUEST = toy_request(pruning=Pruning(PruningStrategy.NONE), max_tokens=24, end_token_ids=())
load = partial(pairs.load, max_context_length=1024)
pytestmark = pytest.mark.skipif(
    not has_packages(), reason="bitsandbytes, compressed-tensors and torchao are not installed"
)


@pytest.fixture(scope="module")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub_form(tmp_path_factory.mktemp("qwen3") / "model", QWEN3)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def weight_of(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.model.model.language_model.layers[0].mlp.up_proj.weight
    return weight


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((QWEN, form) for form in FORMS),
        *((QWEN3, form) for form in ("unsloth bnb-4bit", "Qwen FP8")),
        *((name, "unsloth bnb-4bit") for name in (LLAVA, QWEN2, INTERNVL)),
    ],
)
def test_a_form_of_the_hub_gives_transformers_logits_of_the_same_weights(
    name: str, form: str, tmp_path: Path
) -> None:
    folder, plain = write_quantized(tmp_path, name, form)
    model, reference = load(folder), Reference(plain)
    prompt = prepare(model, user(0, "what is it?"), clip(num_frames=2))
    expected = reference.recompute(prompt, None, (5, 6, 7))[:, : model.info.num_token_ids]
    assert_close(answer(model), expected)
    model.forward(step(0, 1, 8, 9))  # rejected: the next step begins before them
    again = reference.recompute(prompt, None, (5, 4))[-1:, : model.info.num_token_ids]
    assert_close(model.forward(step(0, 1, 4)), again)
    assert (weight_of(model).numel() > 0) == (form == "unsloth bnb-4bit")


def test_layers_stay_in_fp8_where_the_device_multiplies_it(tmp_path: Path) -> None:
    folder, plain = write_quantized(tmp_path, QWEN, "RedHatAI FP8-dynamic")
    with (  # torch multiplies FP8 on a CPU as well, which transformers does not use
        mock.patch.object(quantized, "_multiplies_fp8", lambda device: True),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *device: (9, 0)),
    ):
        model = load(folder, dtype="bfloat16")
    assert weight_of(model).dtype == torch.float8_e4m3fn
    together = answer(model)
    assert relative(together, answer(load(plain))) < 0.2  # activations are rounded to FP8
    one_by_one = [model.forward(step(0, index, token)) for index, token in enumerate((5, 6, 7))]
    assert relative(torch.cat(one_by_one), together[1:]) < 0.02


@pytest.mark.parametrize(
    ("checkpoint", "quantization", "limit"),
    [
        ("target_checkpoint", "int8", 0.15),
        ("internvl_checkpoint", "int8", 0.15),
        ("qwen3_checkpoint", "nf4", 1.2),
        ("llava_checkpoint", "nf4", 1.2),
    ],
)
def test_layers_are_quantised_while_a_plain_checkpoint_is_loaded(
    request: pytest.FixtureRequest, checkpoint: str, quantization: str, limit: float
) -> None:
    folder: Path = request.getfixturevalue(checkpoint)
    model = load(folder, quantization=quantization)
    together = answer(model)
    assert 0 < relative(together, answer(load(folder))) < limit
    for index, token in enumerate((5, 6, 7)):  # rows do not depend on those beside them
        assert_close(model.forward(step(0, index, token)), together[index + 1 : index + 2])
    assert type(weight_of(model)) is not torch.nn.Parameter
    assert type(model.model.lm_head.weight) is torch.nn.Parameter


def test_a_checkpoint_that_torchao_quantised_gives_transformers_logits(
    target_checkpoint: Path, tmp_path: Path
) -> None:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.TorchAoConfig(
        importlib.import_module("torchao.quantization").Int8WeightOnlyConfig(),
        modules_to_not_convert=["model.visual", "lm_head"],
    )
    transformers.AutoModelForImageTextToText.from_pretrained(
        target_checkpoint, quantization_config=config, dtype=torch.float32
    ).save_pretrained(tmp_path)
    transformers.AutoProcessor.from_pretrained(target_checkpoint).save_pretrained(tmp_path)
    model, reference = load(tmp_path), Reference(tmp_path)
    prompt = prepare(model, user(0, "what?"), clip(num_frames=2))
    expected = reference.recompute(prompt, None, ())[-1, : model.info.num_token_ids]
    assert_close(prefill(model, 0, prompt), expected)


@pytest.mark.parametrize(
    ("checkpoint", "target", "draft"),
    [
        ("target_checkpoint", "int8", "nf4"),
        ("qwen3_checkpoint", "nf4", "int8"),
        ("qwen3_checkpoint", "published FP8", None),
    ],
)
async def test_the_output_of_a_quantised_pair_is_that_of_its_target_alone(
    request: pytest.FixtureRequest, checkpoint: str, target: str, draft: str | None, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(checkpoint)
    if target == "published FP8":
        quantised = load(write_quantized(tmp_path, QWEN3, "RedHatAI FP8-dynamic")[0])
    else:
        quantised = load(folder, quantization=target)
    await assert_equal_to_target_only((quantised, load(folder, quantization=draft)), REQUEST)
