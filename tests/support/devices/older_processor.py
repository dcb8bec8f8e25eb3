"""``python -m tests.support.devices.older_processor``: serves the bundled pair in each dtype, and
prints as JSON what it answered. Started with SWITCHES of tests.support.models.processors in its
environment."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import torch

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
_PAIR = Path(__file__).parents[3] / "demo" / "models"


def _load(name: str, dtype: str, **options: Any) -> VideoLanguageModel:
    return load_model(LoadPlan(str(_PAIR / name), dtype=dtype, max_context_length=512, **options))


def _dtypes(dtype: str) -> list[str]:
    models = _load("target", dtype), _load("draft", dtype, auto_is_half=True)
    return [model.info.dtype for model in models]


async def _answers(dtype: str) -> dict[str, Any]:
    """The answers of the target alone and of the pair. In float16 steps are exact, since rounding
    can change a token otherwise; in bfloat16 that would take a quarter of a minute."""
    target_model = _load("target", dtype, exact_rows=8 if dtype == "float16" else None)
    draft_model = _load("draft", dtype)
    decoder = NoiseDecoder()
    request = toy_request(
        "Describe the video in detail.",
        frame_plan=FramePlan(min_pixels=56 * 56, max_pixels=56 * 56),  # few are enough here
        max_tokens=NUM_TOKENS,
        end_token_ids=(),
    )
    async with (
        serving_target(target_model, decoder) as (_, target),
        serving_draft(draft_model, decoder) as (_, draft),
    ):
        return {
            "dtypes": [target_model.info.dtype, draft_model.info.dtype],
            "alone": (await target_only(target, request)).token_ids,
            "together": (await relay(draft, target, request, "optimistic")).token_ids,
        }


def main() -> None:
    """Prints what the libraries can do here, and the answers."""
    torch.set_num_threads(1)
    gc.freeze()  # each load does a collection, which takes half a second with all imported modules
    report = {
        "says_bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "packs_bfloat16": packing(torch.bfloat16) is not None,
        "packs_half": has_half_linear(),
        "answers": {dtype: asyncio.run(_answers(dtype)) for dtype in DTYPE_NAMES},
        "auto": _dtypes("auto"),
    }
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main()
