"""Both services on one real GPU: in float32 every policy gives the target-only output."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from hippo.types import Pruning, PruningStrategy, SamplingParams
from tests.support.models.pairs import NoiseDecoder, load
from tests.support.running.services import (
    POLICIES,
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until_free,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.3, logit_bias=((7, 0.5),)
)
PAIRS = {
    "qwen2.5-vl": ("target_checkpoint", "draft_checkpoint"),
    "llava-onevision": ("llava_checkpoint", "llava_draft_checkpoint"),
    "internvl": ("internvl_checkpoint", "internvl_draft_checkpoint"),
}


@pytest.mark.parametrize("names", PAIRS.values(), ids=PAIRS)
async def test_policies_give_the_target_only_output(
    names: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    folders: list[Path] = [request.getfixturevalue(name) for name in names]
    target_model, draft_model = (load(folder, device="cuda") for folder in folders)
    pruning = Pruning(PruningStrategy.HOLISTIC, 0.5, min_visual_tokens=1)
    requests = [
        toy_request(
            sampling=sampling, pruning=pruning, request_id=name, max_tokens=100, end_token_ids=()
        )
        for name, sampling in (("greedy", SamplingParams()), ("sampled", SAMPLED))
    ]
    decoder = NoiseDecoder()
    async with (
        serving_target(target_model, decoder) as (_, target),
        serving_draft(draft_model, decoder) as (draft_service, draft),
    ):
        alone = [(await target_only(target, each)).token_ids for each in requests]
        for policy in POLICIES[1:]:
            together = await asyncio.gather(
                *(relay(draft, target, each, policy) for each in requests)
            )
            assert [answer.token_ids for answer in together] == alone, policy
            await until_free(draft_service)
