"""All that a model does on one GPU, on a pretended one: tensors meet where they are, the host waits
for nothing inside a step, and the numbers are those of the CPU. Kernels are not what is tested."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from hippo.models.interface.base import Prompt
from hippo.models.interface.base import VideoLanguageModel as Model
from hippo.sampling.masks import mask_logits
from hippo.sampling.sampler import SampleRequest, TokenSampler, choose_step
from hippo.types import SamplingParams
from tests.support.devices.pretend_cuda import PretendTensor, pretend_cuda
from tests.support.models.model_calls import FAMILIES, compare_all
from tests.support.models.pairs import load

FLASH = "qwen2.5-vl, without masks"
SAMPLING = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=5, min_p=0.05),
    SamplingParams(temperature=0.5, repetition_penalty=1.2, presence_penalty=0.3, min_tokens=9),
    SamplingParams(logit_bias=((3, 1.0),), frequency_penalty=0.2),
)


@pytest.mark.parametrize("family", [*FAMILIES, FLASH])
def test_a_gpus_numbers_are_those_of_the_cpu(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options = FAMILIES.get(family, ("target_checkpoint", {}))
    folder: Path = request.getfixturevalue(name)
    here = load(folder, num_slots=4, **options)
    if family == FLASH:
        monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: True)
    with pretend_cuda() as waits:
        there = load(folder, device="cuda", num_slots=4, **options)
        assert there.info.device == "cuda:0"
        assert there.info.device_uuids == ("GPU-pretended",)

        def agree(run: Callable[[Model], torch.Tensor]) -> torch.Tensor:
            """Runs it on both, without a wait; gives the CPU's."""
            expected = run(here)
            waits.clear()
            found = run(there)
            assert waits == []
            assert isinstance(found, PretendTensor)
            torch.testing.assert_close(found.numbers, expected, rtol=1e-4, atol=1e-4)
            return expected

        prompt, logits = compare_all(here, there, agree)
        check_sampling(agree, logits[:3].clone(), prompt)
        waits.clear()
        there.embed_visual(prompt)
        assert waits == [], "pixels do not wait for the tower"


def check_sampling(agree: Callable[..., object], logits: torch.Tensor, prompt: Prompt) -> None:
    both = {"cpu": logits, "cuda:0": logits.to("cuda:0")}

    def choose(model: Model, params: SamplingParams) -> torch.Tensor:
        device = model.info.device
        sampler = TokenSampler(
            params, prompt.input_ids, logits.shape[1], device, end_token_ids=(1,)
        )
        for index in (4, 5):
            request = SampleRequest(sampler, [1, 2, 3, 4, 5][:index], (3, 4))
            found = choose_step([request], both[device])
        return found

    for params in SAMPLING:
        agree(partial(choose, params=params))
    allowed = torch.arange(logits.numel()).view_as(logits) % 3 > 0
    agree(lambda model: mask_logits(both[model.info.device], allowed).isinf())
