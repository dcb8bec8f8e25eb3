"""With steps of fixed shape a bfloat16 pair gives the target-only output, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import grammar_from

from hippo.base.config import SettingsError
from hippo.types import SamplingParams
from services.target.config import TargetSettings
from tests.support.models.pairs import NoiseDecoder, load
from tests.support.running.services import (
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
    until_free,
)

SAMPLED = SamplingParams(temperature=0.9, seed=5)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Threads that share an operation must not change its bits either."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACES = [
    pytest.param({}, id="cpu"),
    pytest.param({"device": "cuda"}, id="gpu", marks=_NEEDS_GPU),
    pytest.param({"device": "cuda", "cuda_graphs": "on"}, id="gpu, graphs", marks=_NEEDS_GPU),
]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("place", PLACES)
async def test_blocks_of_all_kinds_give_the_target_only_output_to_the_last_bit(
    draft_checkpoint: Path, target_checkpoint: Path, place: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "num_slots": 3, **place}
    decoder = NoiseDecoder()
    requests = [
        toy_request("a short one", sampling=SAMPLED, max_tokens=50, end_token_ids=()),
        toy_request("and a longer question", max_tokens=60, end_token_ids=()),
    ]
    target_model = load(target_checkpoint, exact_rows=6, **options)
    form = SamplingParams(temperature=0.9, seed=6, grammar=grammar_from("regex", "[a-z ]{30,45}"))
    ends = target_model.info.end_token_ids
    requests.append(toy_request("one in a form", sampling=form, max_tokens=60, end_token_ids=ends))
    async with (
        serving_target(target_model, decoder) as (_, target),
        serving_draft(load(draft_checkpoint, **options), decoder) as (draft_service, draft),
    ):
        alone = [(await target_only(target, request)).token_ids for request in requests]
        for policy in ("serial", "vpsd", "optimistic"):  # blocks of all kinds
            together = await asyncio.gather(
                *(relay(draft, target, request, policy) for request in requests)
            )
            assert [answer.token_ids for answer in together] == alone, policy
            await until_free(draft_service)  # a draft has no queue


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deterministic": True, "tensor_parallel": 2}, "leave --tensor-parallel out"),
        ({"cuda_graphs": "on", "device": "cuda", "tensor_parallel": 2}, "--cuda-graphs on"),
        ({"cuda_graphs": "on"}, "needs --device cuda"),
        ({"deterministic": True, "deterministic_rows": 0}, "must be 1 to 32"),
        ({"deterministic": True, "deterministic_rows": 33}, "must be 1 to 32"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        TargetSettings(model="m", **changes)


def test_no_prefixes_are_reused_where_bits_count() -> None:
    assert TargetSettings(model="m").keeps_prefixes
    assert not TargetSettings(model="m", deterministic=True).keeps_prefixes
