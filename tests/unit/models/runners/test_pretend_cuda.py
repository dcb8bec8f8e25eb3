"""All that a model does on one GPU, on a pretended one: tensors meet where they are, the host waits
for nothing inside a step, and the numbers are those of the CPU. Kernels are not what is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from tests.support.models.reference import clip, prepare, user

FLASH = "qwen2.5-vl, without masks"
SAMPLING = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=5, min_p=0.05),
    SamplingParams(temperature=0.5, repetition_penalty=1.2, presence_penalty=0.3, min_tokens=9),
    SamplingParams(logit_bias=((3, 1.0),), frequency_penalty=0.2),
)


@dataclass(frozen=True)
class Pair:
    """The same model on the CPU and on a GPU, and what made the host wait for that."""

    here: Model
    there: Model
    waits: list[str]

    def agree(self, run: Callable[[Model], torch.Tensor]) -> torch.Tensor:
        """Runs it on both, without a wait; gives the CPU's."""
        expected = run(self.here)
        self.waits.clear()
        found = run(self.there)
        assert self.waits == []
        assert isinstance(found, PretendTensor)
        torch.testing.assert_close(found.numbers, expected, rtol=1e-4, atol=1e-4)
        return expected


@pytest.fixture(params=[*FAMILIES, FLASH], scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A family on both."""
    name, options = FAMILIES.get(request.param, ("target_checkpoint", {}))
    folder: Path = request.getfixturevalue(name)
    here = load(folder, num_slots=4, **options)
    with pytest.MonkeyPatch.context() as patched:
        if request.param == FLASH:
            patched.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: True)
        with pretend_cuda() as waits:
            yield Pair(here, load(folder, device="cuda", num_slots=4, **options), waits)


def test_a_gpus_numbers_are_those_of_the_cpu(pair: Pair) -> None:
    prompt = prepare(pair.here, user(0, "what is it?"), clip())
    pair.waits.clear()
    pair.there.embed_visual(prompt)
    assert pair.waits == [], "pixels do not wait for the tower"
    assert pair.there.info.device == "cuda:0"
    assert pair.there.info.device_uuids == ("GPU-pretended",)
    prompt, logits = compare_all(pair.here, pair.there, pair.agree)
    check_sampling(pair, logits, prompt)


def check_sampling(pair: Pair, logits: torch.Tensor, prompt: Prompt) -> None:
    logits = logits[:3].clone()
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
        pair.agree(partial(choose, params=params))
    allowed = torch.arange(logits.numel()).view_as(logits) % 3 > 0
    pair.agree(lambda model: mask_logits(both[model.info.device], allowed).isinf())
