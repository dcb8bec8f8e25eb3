"""A model with ordinary steps, and prompts for its slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hippo.models.cached import CachedModel
from hippo.models.interface.base import Prompt
from tests.support.models.pairs import load
from tests.support.models.reference import arranged, clip, prepare

CONTEXT = 600  # two stretches, and a last one that is no multiple


def load_small(folder: Path, **changes: Any) -> CachedModel:
    return load(folder, **({"num_slots": 3, "max_context_length": CONTEXT} | changes))


@pytest.fixture(scope="session")
def ordinary(target_checkpoint: Path) -> CachedModel:
    return load_small(target_checkpoint)


@pytest.fixture(scope="session")
def prompts(ordinary: CachedModel) -> list[Prompt]:
    turns = (
        (clip(), "what is in the thing?"),
        ("and another thing",),
        (clip(num_frames=3, size=112, seed=1), "what?"),
    )
    return [prepare(ordinary, messages, *media) for messages, media in map(arranged, turns)]
