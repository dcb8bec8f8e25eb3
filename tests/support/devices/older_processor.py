"""``python -m tests.support.devices.older_processor``: serves the bundled pair in each dtype, and
checks what it answers. Started with SWITCHES of tests.support.models.processors in its environment.
"""

import asyncio
import gc
import platform
from typing import Any

import torch

from hippo.cli.stack import BUNDLED_PAIR
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.plan import DTYPE_NAMES, LoadPlan
from hippo.models.load import load_model
from hippo.models.products.linear import has_half_linear, packing
from hippo.types import FramePlan
from tests.support.models.pairs import NoiseDecoder
from tests.support.running.services import (
    relay,
    serving_draft,
    serving_target,
    target_only,
    toy_request,
)

NUM_TOKENS = 6


def _load(name: str, dtype: str, **options: Any) -> VideoLanguageModel:
    plan = LoadPlan(str(BUNDLED_PAIR / name), dtype=dtype, max_context_length=512, **options)
    return load_model(plan)


async def _check_answers(dtype: str) -> None:
    """Of the target alone and of the pair. In float16 steps are exact, since rounding can change a
    token otherwise; in bfloat16 that would take a quarter of a minute."""
    target_model = _load("target", dtype, exact_rows=8 if dtype == "float16" else None)
    draft_model = _load("draft", dtype)
    assert [target_model.info.dtype, draft_model.info.dtype] == [dtype, dtype]
    request = toy_request(
        "Describe the video in detail.",
        frame_plan=FramePlan(min_pixels=56 * 56, max_pixels=56 * 56),  # few are enough here
        max_tokens=NUM_TOKENS,
        end_token_ids=(),
    )
    async with (
        serving_target(target_model, NoiseDecoder()) as (_, target),
        serving_draft(draft_model, NoiseDecoder()) as (_, draft),
    ):
        alone = (await target_only(target, request)).token_ids
        together = (await relay(draft, target, request, "optimistic")).token_ids
    assert len(alone) == len(together) == NUM_TOKENS
    assert dtype == "bfloat16" or together == alone, dtype


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # each load does a collection, which takes half a second with all imported modules
    packs_bfloat16 = packing(torch.bfloat16) is not None
    if platform.machine() == "x86_64":  # elsewhere the switches do nothing
        assert not torch.ops.mkldnn._is_mkldnn_bf16_supported() and not packs_bfloat16
    for dtype in DTYPE_NAMES:
        asyncio.run(_check_answers(dtype))
    plain = "bfloat16" if packs_bfloat16 else "float32"
    assert _load("target", "auto").info.dtype == plain
    half = "float16" if has_half_linear() else plain
    assert _load("draft", "auto", auto_is_half=True).info.dtype == half


if __name__ == "__main__":
    main()
