"""Both services with their models on a pretended GPU: outputs are the CPU's target-only ones, and
the device threads wait for nothing but tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.engine.device_thread import DeviceThread
from hippo.engine.jobs import Jobs
from hippo.rpc.client import DraftClient, TargetClient
from hippo.types import OpenRequest, Pruning, PruningStrategy, SamplingParams
from tests.support.devices.pretend_cuda import on_thread, pretended_device
from tests.support.models.pairs import NoiseDecoder, load
from tests.support.running.services import (
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)

SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.3, logit_bias=((7, 0.5),)
)
PRUNING = Pruning(PruningStrategy.HOLISTIC, 0.5, min_visual_tokens=1)
# For tokens; for the order of a tower's windows; for what warms up.
_MAY_WAIT = ("tolist at sampler.py", "index at qwen_vl.py", "int at warmup.py")


@dataclass(frozen=True)
class Pair:
    """Both services, and what made their device threads wait."""

    draft: DraftClient
    target: TargetClient
    waits: list[str]
    settled: list[int]  # by forward: when the piece before it was over, or 0


@pytest.fixture(params=[False, True], ids=["masks", "flash attention"])
async def pair(
    request: pytest.FixtureRequest,
    draft_checkpoint: Path,
    target_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Pair]:
    waits, settled = list[str](), list[int]()
    run: Any = DeviceThread._run

    def run_there(thread: DeviceThread) -> None:
        with on_thread(waits):
            run(thread)

    def wait_for_device(jobs: Jobs) -> int:
        settled.append(wait_really(jobs))
        return settled[-1]

    wait_really = Jobs.wait_for_device
    monkeypatch.setattr(DeviceThread, "_run", run_there)
    monkeypatch.setattr(Jobs, "wait_for_device", wait_for_device)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: request.param)
    with pretended_device():
        with on_thread([]):
            draft, target = (
                load(one, device="cuda") for one in (draft_checkpoint, target_checkpoint)
            )
        decoder = NoiseDecoder()
        async with (
            serving_target(target, decoder) as (_, target_client),
            serving_draft(draft, decoder) as (_, draft_client),
        ):
            yield Pair(draft_client, target_client, waits, settled)


@pytest.fixture(scope="module")
def requests() -> list[OpenRequest]:
    return [
        toy_request(
            sampling=sampling,
            pruning=PRUNING,
            request_id=str(index),
            max_tokens=12,
            end_token_ids=(),
        )
        for index, sampling in enumerate((SamplingParams(), SAMPLED))
    ]


@pytest.fixture
async def expected(target_checkpoint: Path, requests: list[OpenRequest]) -> list[list[int]]:
    model = load(target_checkpoint)
    async with serving_target(model, NoiseDecoder()) as (_, client):
        return [(await target_only(client, request)).token_ids for request in requests]


async def test_services_on_a_gpu_answer_as_the_target_on_a_cpu(
    expected: list[list[int]], requests: list[OpenRequest], pair: Pair
) -> None:
    for request, token_ids in zip(requests, expected, strict=True):
        assert (await target_only(pair.target, request)).token_ids == token_ids
        for policy in ("vpsd", "adaptive"):
            answer = await relay(pair.draft, pair.target, request, policy)
            assert answer.token_ids == token_ids
            assert answer.selection is not None and answer.selection.kept_indices
    assert {wait for wait in pair.waits if not wait.startswith(_MAY_WAIT)} == set()
    assert any(pair.settled) and not all(pair.settled)
    assert torch.cuda.device_count() == 1
