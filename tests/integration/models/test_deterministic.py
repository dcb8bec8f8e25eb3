"""With steps of fixed shape a bfloat16 pair gives the target-only output, token for token; without
AVX-512 every dtype is served."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import grammar_from

from hippo.types import SamplingParams
from tests.support.models.pairs import assert_equal_to_target_only, load
from tests.support.models.processors import SWITCHES
from tests.support.running.services import toy_request

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
    target = load(target_checkpoint, exact_rows=6, **options)
    form = SamplingParams(temperature=0.9, seed=6, grammar=grammar_from("regex", "[a-z ]{30,45}"))
    await assert_equal_to_target_only(
        (target, load(draft_checkpoint, **options)),
        toy_request("a short one", sampling=SAMPLED, max_tokens=50, end_token_ids=()),
        toy_request("and a longer question", max_tokens=60, end_token_ids=()),
        toy_request("one in a form", sampling=form, max_tokens=60,
                    end_token_ids=target.info.end_token_ids),
    )  # fmt: skip


@pytest.mark.timeout(300)  # it loads eight models
def test_every_dtype_is_served_without_avx_512() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.devices.older_processor"],
        env=os.environ | SWITCHES,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
