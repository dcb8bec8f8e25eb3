"""One loaded model of each kind, and the same checkpoint in transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hippo.models.cached import CachedModel
from tests.support.devices.threads import one_thread as one_thread
from tests.support.models.families import ALL_FAMILIES, write_family
from tests.support.models.hub import serving_hub
from tests.support.models.pairs import load
from tests.support.models.reference import Reference


@pytest.fixture(scope="session")
def reference(target_checkpoint: Path) -> Reference:
    return Reference(target_checkpoint)


@pytest.fixture(scope="session")
def model(target_checkpoint: Path) -> CachedModel:
    """The adapter in float32 with three slots."""
    return load(target_checkpoint, num_slots=3)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CachedModel:
    """A model of each kind of tower in float32 with three slots."""
    folder = write_family(tmp_path_factory.mktemp("family") / "tiny", request.param)
    return load(folder, num_slots=3)


@pytest.fixture(scope="session")
def experts_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("experts") / "tiny", "qwen3_vl_moe")


class Held(NamedTuple):
    """A model, and what it is held against."""

    model: CachedModel
    reference: Reference
    folder: Path


@pytest.fixture(scope="session", params=ALL_FAMILIES)
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Held:
    folder = write_family(tmp_path_factory.mktemp("held") / "tiny", request.param)
    return Held(load(folder, num_slots=3), Reference(folder), folder)


@pytest.fixture
def hub(target_checkpoint: Path) -> Iterator[str]:
    """A hub's address; it has the target's checkpoint as org/model."""
    with serving_hub({"org/model": target_checkpoint}) as address:
        yield address
