"""One loaded model of each kind, and the same checkpoint in transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hippo.models.base import VideoLanguageModel
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from tests.support.hub import HubServer
from tests.support.reference import Reference


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are no faster with more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference(target_checkpoint: Path) -> Reference:
    """transformers' model and processor."""
    return Reference(target_checkpoint)


@pytest.fixture(scope="session", params=["fused", "as transformers has it"])
def model(target_checkpoint: Path, request: pytest.FixtureRequest) -> VideoLanguageModel:
    """The adapter in float32 with three slots, on both of its ways to run a layer."""
    return load_model(
        LoadPlan(
            str(target_checkpoint),
            dtype="float32",
            num_slots=3,
            max_context_length=512,
            served_name="tiny",
            is_fused=request.param == "fused",
        )
    )


@pytest.fixture(
    scope="module",
    params=[
        ("target_checkpoint", True),
        ("target_checkpoint", False),
        ("llava_checkpoint", True),
    ],
    ids=["qwen2.5-vl", "qwen2.5-vl as transformers has it", "llava-onevision"],
)
def family(request: pytest.FixtureRequest) -> VideoLanguageModel:
    """Each family, and both ways to run a layer, in float32 with three slots."""
    name, is_fused = request.param
    folder: Path = request.getfixturevalue(name)
    return load_model(
        LoadPlan(
            str(folder), dtype="float32", num_slots=3, max_context_length=512, is_fused=is_fused
        )
    )


@pytest.fixture
def hub(target_checkpoint: Path) -> Iterator[str]:
    """A hub's address; it has the target's checkpoint as org/model."""
    with HubServer({"org/model": target_checkpoint}) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()
