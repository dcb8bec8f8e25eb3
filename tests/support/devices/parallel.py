"""A model on two ranks of this machine's CPU: this process and a follower."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.parallel.source import ParallelSource


def plan_of(folder: Path, **changes: Any) -> LoadPlan:
    values: dict[str, Any] = {
        "model": str(folder),
        "tensor_parallel": 2,
        "num_threads": 1,
        "dtype": "float32",
        "num_slots": 3,
        "max_context_length": 512,
    }
    return LoadPlan(**(values | changes))


@contextmanager
def two_ranks(folder: Path, **changes: Any) -> Iterator[tuple[VideoLanguageModel, ParallelSource]]:
    """Loads and ends a model on two ranks; afterwards no process of it is left."""
    if torch.accelerator.is_available():
        pytest.skip("ranks on the CPU need the accelerator hidden: CUDA_VISIBLE_DEVICES=")
    source = ParallelSource(plan_of(folder, **changes))
    try:
        yield source.load(lambda _stage, _share: None), source
    finally:
        source.close()
        assert followers_of(os.getpid()) == []


def followers_of(process_id: int) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(process_id).children()
        if "hippo.parallel.follower" in child.cmdline()
    ]
