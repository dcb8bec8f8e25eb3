"""On a real GPU quantised layers give the numbers of the weights that they stand for, and every
policy gives the target-only output; on a pretended GPU services wait for nothing but tokens."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.engine.device_thread import DeviceThread
from hippo.engine.jobs import Jobs
from hippo.models.cached import CachedModel
from hippo.models.runners.captured import CapturedRunner
from hippo.types import OpenRequest, Pruning, PruningStrategy, SamplingParams
from tests.support.devices.pretend_cuda import on_thread, pretended_device
from tests.support.models import pairs
from tests.support.models.pairs import NoiseDecoder, assert_equal_to_target_only
from tests.support.models.quantized import has_packages, write_quantized
from tests.support.models.reference import clip, prefill, prepare, step, user
from tests.support.running.services import (
    POLICIES,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)

load = partial(pairs.load, max_context_length=1024)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_packages = pytest.mark.skipif(
    not has_packages(), reason="the group quantized is not installed"
)

NAME = "Qwen/Qwen2.5-VL-72B-Instruct"
BFLOAT16, FP8 = 0.05, 0.2  # shares that may differ by rounding; FP8 rounds activations as well

# The form that is stored, or what a plain checkpoint is quantised to while it is loaded.
FORMS: dict[str, tuple[str | None, str | None, float]] = {
    "nf4, stored": ("unsloth bnb-4bit", None, BFLOAT16),
    "nf4": (None, "nf4", BFLOAT16),
    "int8": (None, "int8", BFLOAT16),
    "FP8 by rows": ("RedHatAI FP8-dynamic", None, FP8),
    "int4, stored": ("RedHatAI quantized.w4a16", None, BFLOAT16),
    "int8, stored": ("RedHatAI quantized.w8a8", None, BFLOAT16),
    "AWQ": ("Qwen AWQ", None, BFLOAT16),
}


def _written(folder: Path, name: str) -> tuple[Path, dict[str, Any], Path]:
    """A checkpoint, the options to load it with, and a plain one of the same weights."""
    form, quantization, _ = FORMS[name]
    quantised, plain = write_quantized(folder, NAME, form or "unsloth bnb-4bit")
    return (quantised, {}, plain) if form else (plain, {"quantization": quantization}, plain)


def _answer(model: CachedModel) -> torch.Tensor:
    """Logits after a prompt with a clip, and of steps of several sizes."""
    prompt = prepare(model, user(0, "what is it?"), clip(num_frames=2))
    found = [prefill(model, 0, prompt)[None]]
    for count in (1, 2, 5, 8, 9, 33):
        found.append(model.forward(step(0, 0, *range(5, 5 + count))).clone())
    return torch.cat(found).float().cpu()


@needs_gpu
@needs_packages
@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_weights_that_the_form_stands_for(
    form: str, graphs: str, tmp_path: Path
) -> None:
    folder, options, plain = _written(tmp_path, form)
    model = load(folder, device="cuda", dtype="bfloat16", cuda_graphs=graphs, **options)
    if graphs == "on":
        assert list(model.capture_steps())
        assert isinstance(model._fixed, CapturedRunner) and model._fixed._capture is not None
    expected = _answer(load(plain, dtype="float32", device="cpu"))
    difference = float((_answer(model) - expected).norm() / expected.norm())
    assert difference < FORMS[form][2]


@needs_gpu
@needs_packages
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
    folder, quantised, _ = _written(tmp_path, form)
    models = (
        load(folder, device="cuda", **options, **quantised),
        load(folder, device="cuda", dtype=options["dtype"], **quantised),
    )
    request = toy_request(max_tokens=60, end_token_ids=())
    await assert_equal_to_target_only(models, request, prefix_cache=False)


def asked(max_tokens: int) -> list[OpenRequest]:
    values: dict[str, Any] = {"max_tokens": max_tokens, "end_token_ids": ()}
    values["pruning"] = Pruning(PruningStrategy.HOLISTIC, 0.5, min_visual_tokens=1)
    sampled = SamplingParams(
        temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.3, logit_bias=((7, 0.5),)
    )
    return [toy_request(**values), toy_request(request_id="2", sampling=sampled, **values)]


@needs_gpu
@pytest.mark.parametrize("prefix", ["", "llava_", "internvl_"])
async def test_policies_give_the_target_only_output(
    prefix: str, request: pytest.FixtureRequest
) -> None:
    names = f"{prefix}checkpoint" if prefix else "target_checkpoint", f"{prefix}draft_checkpoint"
    models = (load(request.getfixturevalue(name), device="cuda") for name in names)
    await assert_equal_to_target_only(models, *asked(100), policies=POLICIES[1:])


# For tokens; for the order of a tower's windows; for what warms up.
_MAY_WAIT = ("tolist at sampler.py", "index at qwen_vl.py", "int at warmup.py")


@pytest.mark.parametrize("has_flash", [False, True], ids=["masks", "flash attention"])
async def test_services_on_a_gpu_answer_as_the_target_on_a_cpu(
    has_flash: bool,
    draft_checkpoint: Path,
    target_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, settled = list[str](), list[int]()  # by forward: when the piece before it was over, or 0
    run: Any = DeviceThread._run

    def run_there(thread: DeviceThread) -> None:
        with on_thread(waits):
            run(thread)

    def wait_for_device(jobs: Jobs) -> int:
        settled.append(wait_really(jobs))
        return settled[-1]

    async with serving_target(load(target_checkpoint), NoiseDecoder()) as (_, client):
        expected = [(await target_only(client, request)).token_ids for request in asked(12)]
    wait_really = Jobs.wait_for_device
    monkeypatch.setattr(DeviceThread, "_run", run_there)
    monkeypatch.setattr(Jobs, "wait_for_device", wait_for_device)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: has_flash)
    with pretended_device():
        with on_thread([]):
            models = [load(each, device="cuda") for each in (target_checkpoint, draft_checkpoint)]
        async with (
            serving_target(models[0], NoiseDecoder()) as (_, target),
            serving_draft(models[1], NoiseDecoder()) as (_, draft),
        ):
            for request, token_ids in zip(asked(12), expected, strict=True):
                assert (await target_only(target, request)).token_ids == token_ids
                for policy in ("vpsd", "adaptive"):
                    answer = await relay(draft, target, request, policy)
                    assert answer.token_ids == token_ids
                    assert answer.selection is not None and answer.selection.kept_indices
        assert torch.cuda.device_count() == 1
    assert {wait for wait in waits if not wait.startswith(_MAY_WAIT)} == set()
    assert any(settled) and not all(settled)
