"""What a long prompt takes in this process, beside what is worked out from the configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.tensor_trace import TensorTrace, resident_bytes
from hippo.models.base import DecodedMedia, SequenceRows, StepPlan
from hippo.models.cache import cache_dtype
from hippo.models.loading import DTYPES, load_model
from hippo.sizes import find_shape
from hippo.types import ChatMessage, FramePlan, Media, MediaKind, MediaPart, TextPart
from hippo.video.decoder import MediaDecoder
from hippo.video.limits import DecodeLimits

_CPU = torch.device("cpu")


def measure_memory(
    pair: Mapping[str, Path],
    clip: Path,
    question: str,
    *,
    context: int,
    dtype: str,
    num_tokens: int,
    ratio: float,
) -> dict[str, dict[str, int]]:
    """By role: bytes computed and measured. The draft caches ``1 - ratio`` of the visual tokens.

    ``work`` is the peak of all tensors of vision tower, prefill and ``num_tokens`` steps;
    ``resident`` the growth of the process from before the model's loading to after the answer,
    less the prompt's own tensors.
    """
    torch.set_num_threads(1)
    load_model(str(pair["draft"]), dtype=dtype, max_context_length=256)  # libraries are there then
    frame_plan = FramePlan()
    media = asyncio.run(_decode(clip, frame_plan))
    results = {}
    for role, folder in pair.items():
        before = resident_bytes()
        model = load_model(str(folder), dtype=dtype, max_context_length=context)
        loaded = resident_bytes()
        message = ChatMessage("user", (MediaPart(0), TextPart(question)))
        prompt = model.prepare([message], [media], frame_plan)
        num_visual = int(prompt.visual_indices.shape[0])
        kept = None
        if role == "draft":
            kept = torch.linspace(0, num_visual - 1, round(num_visual * (1 - ratio))).long()
        prepared = resident_bytes()
        trace = TensorTrace()
        with trace:
            *_, logits = model.prefill(0, prompt, model.embed_visual(prompt), kept)
            assert logits is not None
            token_id = int(logits.argmax())
            for index in range(num_tokens - 1):
                rows = SequenceRows(0, index, (token_id,))
                token_id = int(model.forward(StepPlan((rows,)))[-1].argmax())
        working = DTYPES[dtype]
        kept_dtype = cache_dtype(working, _CPU)
        shape = find_shape(str(folder))
        num_cached = prompt.length - (0 if kept is None else num_visual - kept.shape[0])
        num_used = num_cached + num_tokens
        results[role] = {
            "prompt_tokens": prompt.length,
            "cached_tokens": num_used,
            "weights_computed": shape.num_parameters * working.itemsize,
            "weights_measured": loaded - before,
            "slot_computed": shape.cache_bytes(context, bytes_each=kept_dtype.itemsize),
            "slot_allocated": model._cache._data.nbytes,  # type: ignore[attr-defined]
            "cache_used_computed": shape.cache_bytes(num_used, bytes_each=kept_dtype.itemsize),
            "resident_after_answer": resident_bytes() - prepared,
            "work_computed": shape.work_bytes(
                prompt.length, bytes_each=working.itemsize, cache_each=kept_dtype.itemsize
            ),
            "work_measured": trace.peak_bytes,
        }
        del model, prompt, trace
    return results


async def _decode(clip: Path, plan: FramePlan) -> DecodedMedia:
    decoder = MediaDecoder(DecodeLimits(timeout_s=120.0))
    await decoder.start()
    try:
        return await decoder.decode(Media(MediaKind.VIDEO, clip.read_bytes()), plan)
    finally:
        await decoder.close()
