"""A model with ordinary steps, and prompts for its slots."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hippo.models.cached import CachedModel
from hippo.models.interface.base import Prompt, StepPlan
from tests.support.models.pairs import load
from tests.support.models.reference import arranged, assert_close, clip, prefill, prepare

CONTEXT = 600  # two stretches, and a last one that is no multiple


def load_small(folder: Path, **changes: Any) -> CachedModel:
    return load(folder, **({"num_slots": 3, "max_context_length": CONTEXT} | changes))


@pytest.fixture(scope="session")
def ordinary(target_checkpoint: Path) -> CachedModel:
    return load_small(target_checkpoint)


class Both(NamedTuple):
    """What a model with other steps is held against, and its checkpoint."""

    folder: Path
    ordinary: CachedModel
    prompts: list[Prompt]

    def agree(self, model: CachedModel, plan: StepPlan) -> None:
        expected = self.ordinary.forward(plan)
        assert_close(model.forward(plan), expected)

    def prefill(self, model: CachedModel, slot: int, number: int) -> None:
        for one in (self.ordinary, model):
            prefill(one, slot, self.prompts[number])


@pytest.fixture(scope="session")
def both(target_checkpoint: Path, ordinary: CachedModel, prompts: list[Prompt]) -> Both:
    return Both(target_checkpoint, ordinary, prompts)


@pytest.fixture(scope="session")
def prompts(ordinary: CachedModel) -> list[Prompt]:
    turns = (
        (clip(), "what is in the thing?"),
        ("and another thing",),
        (clip(num_frames=3, size=112, seed=1), "what?"),
    )
    return [prepare(ordinary, messages, *media) for messages, media in map(arranged, turns)]
