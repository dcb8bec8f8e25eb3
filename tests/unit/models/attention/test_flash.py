"""Where there is no FlashAttention, the log says why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from hippo.models.attention.cache import CacheShape, KeyValueCache
from hippo.models.attention.ranges import find_flash
from hippo.models.interface.plan import LoadPlan
from hippo.models.runners.captured import make_fixed_runner
from tests.support.devices.pretend_cuda import CUDA, pretend_cuda


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (torch.float32, 8, "bfloat16 or float16, not float32"),
        (torch.bfloat16, 12, "multiple of 8 numbers, not of 12"),
        (torch.bfloat16, 8, "cuda:0 does not run it with heads of 8 numbers"),
    ],
)
def test_the_warning_says_why_graphs_are_off(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype,
    head_dim: int,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: False)
    with pretend_cuda():
        shape = CacheShape(num_layers=1, num_slots=1, num_kv_heads=1, capacity=8, head_dim=head_dim)
        cache = KeyValueCache(shape, dtype=dtype, device=CUDA)
        found = find_flash(cache, 7)
    nothing: Any = None
    caplog.set_level(logging.INFO)
    for choice, level in (("on", logging.WARNING), ("auto", logging.INFO)):
        caplog.clear()
        plan = LoadPlan("m", device="cuda", cuda_graphs=choice)
        assert make_fixed_runner(plan, nothing, cache, nothing, found) is None
        (record,) = caplog.records
        assert record.levelno == level
        assert reason in record.getMessage() and "CUDA graphs are off" in record.getMessage()
