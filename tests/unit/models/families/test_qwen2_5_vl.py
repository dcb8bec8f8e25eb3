"""What is Qwen2.5-VL's own, and what a forward computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.models.cached import CachedModel
from hippo.models.interface.base import Prompt, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from tests.support.models.processors import running_on
from tests.support.models.reference import (
    Reference,
    assert_close,
    clip,
    prefill,
    prepare,
    step,
    user,
)


@pytest.fixture(scope="module")
def prompt(model: VideoLanguageModel) -> Prompt:
    return prepare(model, user(0, "what is in the thing?"), clip())


@pytest.mark.parametrize(("is_packed", "num_computed"), [(True, 40), (False, 34)])
def test_a_forward_is_filled_up_where_numbers_of_rows_are_prepared(
    target_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_packed: bool,
    num_computed: int,
) -> None:
    with running_on("AVX2" if is_packed else "unknown"):
        plan = LoadPlan(str(target_checkpoint), dtype="float32", max_context_length=512)
        model = load_model(plan)
    assert isinstance(model, CachedModel)
    prefill(model, 0, prepare(model, user("what?")))
    numbers, run = [], model._stack.run

    def counting(hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        numbers.append(hidden.shape[0])
        return run(hidden, *others)

    monkeypatch.setattr(model._stack, "run", counting)
    assert model.forward(step(0, 0, *range(1, 35))).shape[0] == 34
    assert numbers == [num_computed]


def test_positions_follow_the_sampled_frame_rate(
    model: VideoLanguageModel, reference: Reference
) -> None:
    slow = clip(num_frames=8, fps=0.25)
    prompt = prepare(model, user(0, "what?"), slow)
    inputs = reference.inputs([{"type": "video"}, {"type": "text", "text": "what?"}], [slow])
    positions, _ = reference.model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        video_grid_thw=inputs["video_grid_thw"],
        second_per_grid_ts=inputs["second_per_grid_ts"],
    )
    assert torch.equal(prompt.positions, positions[:, 0])
    assert prompt.next_position == int(positions[0, 0, -1]) + 1 < int(positions.max())
    times = sorted(set(prompt.positions[0, prompt.visual_indices].tolist()))
    assert [time - times[0] for time in times] == [
        0,
        16,
        32,
        48,
    ]  # 2 frames at 0.25 a second, 2 tokens a second


@pytest.mark.parametrize("chunk_rows", [33, 1024])
def test_the_last_layer_of_a_prompt_goes_on_with_its_last_row_only(
    model: VideoLanguageModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    rows = []

    def silu(gate: torch.Tensor) -> torch.Tensor:
        rows.append(gate.shape[0])
        return torch.nn.functional.silu(gate)

    monkeypatch.setattr("hippo.models.cached._CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr("hippo.models.runners.decoder.silu", silu)
    prefill(model, 0, prompt)
    chunks = [min(chunk_rows, prompt.length - i) for i in range(0, prompt.length, chunk_rows)]
    assert rows[-len(chunks) :] == [1] * len(chunks)
    assert sum(rows) == (model.num_layers - 1) * prompt.length + len(chunks)


def test_rotary_positions_beyond_the_first_table_equal_recomputing(
    model: VideoLanguageModel, reference: Reference
) -> None:
    prompt = replace(prepare(model, user(0, "what?"), clip()), next_position=1000)
    prefill(model, 0, prompt)
    assert_close(
        model.forward(step(0, 0, 40, 41, 42)),
        reference.recompute(prompt, None, (40, 41, 42))[1:],
    )
