"""One loaded model of each kind, and the same checkpoint in transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from tests.support.devices.threads import one_thread as one_thread
from tests.support.models.families import ALL_FAMILIES, write_family
from tests.support.models.hub import HubServer
from tests.support.models.reference import Reference


@pytest.fixture(scope="session")
def reference(target_checkpoint: Path) -> Reference:
    """transformers' model and processor."""
    return Reference(target_checkpoint)


@pytest.fixture(scope="session")
def model(target_checkpoint: Path) -> VideoLanguageModel:
    """The adapter in float32 with three slots."""
    return load_model(
        LoadPlan(
            str(target_checkpoint),
            dtype="float32",
            num_slots=3,
            max_context_length=512,
            served_name="tiny",
        )
    )


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> VideoLanguageModel:
    """A model of each kind of tower in float32 with three slots."""
    folder = write_family(tmp_path_factory.mktemp("family") / "tiny", request.param)
    return load_model(LoadPlan(str(folder), dtype="float32", num_slots=3, max_context_length=512))


@pytest.fixture(scope="session")
def experts_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint with mixtures of experts."""
    return write_family(tmp_path_factory.mktemp("experts") / "tiny", "qwen3_vl_moe")


class Held(NamedTuple):
    """A model, and what it is held against."""

    model: VideoLanguageModel
    reference: Reference
    folder: Path


@pytest.fixture(scope="session", params=ALL_FAMILIES)
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Held:
    """Each family."""
    folder = write_family(tmp_path_factory.mktemp("held") / "tiny", request.param)
    plan = LoadPlan(str(folder), dtype="float32", num_slots=3, max_context_length=512)
    return Held(load_model(plan), Reference(folder), folder)


@pytest.fixture
def hub(target_checkpoint: Path) -> Iterator[str]:
    """A hub's address; it has the target's checkpoint as org/model."""
    with HubServer({"org/model": target_checkpoint}) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()
