"""At the start of a service its longest prompt is run, so that a lack of memory shows then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hippo.engine.warmup import longest_prompt, run_longest, warm_prompt
from hippo.errors import ModelLoadError
from hippo.models.cached import CachedModel
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from tests.support.models.families import write_family


def test_the_longest_prompt_fills_the_context_up_to_a_grid(family: VideoLanguageModel) -> None:
    short = warm_prompt(family)
    longest = longest_prompt(family, short)
    num_tokens = int(longest.visual_indices.shape[0])
    per_grid = family.frame_limits.fixed_tokens or num_tokens // longest.visual_grids[0][0]
    left = family.info.max_context_length - 1 - longest.length
    assert short.length < longest.length and 0 <= left < per_grid
    run_longest(family, longest, slot=1, num_tapped=1)


def test_the_times_between_frames_fit_into_the_context_as_well(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "tiny", "qwen3_vl")
    model = load_model(LoadPlan(str(folder), dtype="float32", max_context_length=4000))
    longest = longest_prompt(model, warm_prompt(model))
    per_grid = longest.length // longest.visual_grids[0][0]
    assert per_grid > 256 and 0 <= 3999 - longest.length < per_grid


def test_a_lack_of_memory_names_the_flags_that_help(family: VideoLanguageModel) -> None:
    def fails(*_: Any) -> Iterator[None]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        yield

    longest = longest_prompt(family, warm_prompt(family))
    with (
        mock.patch.object(type(family), "prefill", fails),
        pytest.raises(ModelLoadError, match=r"CUDA out of memory\): lower --max-context-length"),
    ):
        run_longest(family, longest, slot=0, num_tapped=0)


@pytest.mark.parametrize("num_slots", [1, None])
def test_the_context_is_the_checkpoints_own_where_memory_suffices(
    target_checkpoint: Path, num_slots: int | None
) -> None:
    model = load_model(LoadPlan(str(target_checkpoint), num_slots=num_slots))
    assert isinstance(model, CachedModel)
    limit = model.model.config.text_config.max_position_embeddings
    assert model.info.max_context_length == limit


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_small_memory_shortens_the_context(target_checkpoint: Path, num_slots: int) -> None:
    with mock.patch("hippo.models.loading.memory.available_bytes", lambda device: 120 << 20):
        plan = LoadPlan(
            str(target_checkpoint), num_slots=num_slots, vision_cache_bytes=0, media_cache_bytes=0
        )
        context = load_model(plan).info.max_context_length
    assert context % 256 == 0 and 0 < context < 4096  # the checkpoint's limit
