"""Quantised layers on a real GPU give the numbers of the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.models.cached import CachedModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.runners.captured import CapturedRunner
from tests.support.models.pairs import NoiseDecoder
from tests.support.models.quantized import has_packages, write_quantized
from tests.support.models.reference import clip, prefill, prepare, step, user
from tests.support.running.services import (
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_packages(), reason="the group quantized is not installed"),
]

NAME = "Qwen/Qwen2.5-VL-72B-Instruct"
BFLOAT16, FP8 = 0.05, 0.2  # shares that may differ by rounding; FP8 rounds activations as well

Source = Callable[[Path, str], tuple[Path, dict[str, Any], Path]]


def _stored(form: str) -> Source:
    """A checkpoint that is stored in a form."""

    def write(folder: Path, name: str) -> tuple[Path, dict[str, Any], Path]:
        quantised, plain = write_quantized(folder, name, form)
        return quantised, {}, plain

    return write


def _at_load(quantization: str) -> Source:
    """A plain checkpoint that is quantised while it is loaded."""

    def write(folder: Path, name: str) -> tuple[Path, dict[str, Any], Path]:
        _, plain = write_quantized(folder, name, "unsloth bnb-4bit")
        return plain, {"quantization": quantization}, plain

    return write


FORMS: dict[str, tuple[Source, float]] = {
    "nf4, stored": (_stored("unsloth bnb-4bit"), BFLOAT16),
    "nf4": (_at_load("nf4"), BFLOAT16),
    "int8": (_at_load("int8"), BFLOAT16),
    "FP8 by rows": (_stored("RedHatAI FP8-dynamic"), FP8),
    "int4, stored": (_stored("RedHatAI quantized.w4a16"), BFLOAT16),
    "int8, stored": (_stored("RedHatAI quantized.w8a8"), BFLOAT16),
    "AWQ": (_stored("Qwen AWQ"), BFLOAT16),
}


def _load(folder: Path, **changes: Any) -> CachedModel:
    options: dict[str, Any] = {"num_slots": 2, "max_context_length": 1024, **changes}
    model = load_model(LoadPlan(str(folder), **options))
    assert isinstance(model, CachedModel)
    return model


def _answer(model: CachedModel) -> torch.Tensor:
    """Logits after a prompt with a clip, and of steps of several sizes."""
    prompt = prepare(model, user(0, "what is it?"), clip(num_frames=2))
    found = [prefill(model, 0, prompt)[None]]
    for count in (1, 2, 5, 8, 9, 33):
        found.append(model.forward(step(0, 0, *range(5, 5 + count))).clone())
    return torch.cat(found).float().cpu()


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize(("source", "limit"), FORMS.values(), ids=FORMS)
def test_logits_are_those_of_the_weights_that_the_form_stands_for(
    source: Source, limit: float, graphs: str, tmp_path: Path
) -> None:
    folder, options, plain = source(tmp_path, NAME)
    model = _load(folder, device="cuda", dtype="bfloat16", cuda_graphs=graphs, **options)
    if graphs == "on":
        assert list(model.capture_steps())
        assert isinstance(model._fixed, CapturedRunner) and model._fixed._capture is not None
    expected = _answer(_load(plain, dtype="float32", device="cpu"))
    difference = float((_answer(model) - expected).norm() / expected.norm())
    assert difference < limit


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("nf4", {"dtype": "float32"}),
        ("int8", {"dtype": "float32"}),
        *(
            (form, {"dtype": "bfloat16", "exact_rows": 6, "cuda_graphs": graphs})
            for form in ("nf4", "int8", "int4, stored", "AWQ", "FP8 by rows")
            for graphs in ("off", "on")
        ),
    ],
)
async def test_the_output_is_that_of_the_target_alone(
    form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder, quantised, _ = FORMS[form][0](tmp_path, NAME)
    request = toy_request(max_tokens=60, end_token_ids=())
    target_model = _load(folder, device="cuda", **options, **quantised)
    draft_model = _load(folder, device="cuda", dtype=options["dtype"], **quantised)
    decoder = NoiseDecoder()
    async with (
        serving_target(target_model, decoder, prefix_cache=False) as (_, target),
        serving_draft(draft_model, decoder) as (_, draft),
    ):
        alone = await target_only(target, request)
        assert len(alone.token_ids) == 60
        for policy in ("serial", "vpsd", "optimistic"):
            answer = await relay(draft, target, request, policy)
            assert answer.token_ids == alone.token_ids, policy
