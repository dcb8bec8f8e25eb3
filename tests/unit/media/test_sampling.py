"""Which frames are looked at: the counts and places of the reference processor."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.errors import InvalidRequestError
from hippo.media.limits import DecodeLimits
from hippo.media.sampling import count_frames, resolve_plan, sample_frames
from hippo.types import FramePlan

DEFAULT = FramePlan(fps=2.0, min_frames=4, max_frames=768)


@pytest.fixture(scope="module")
def reference() -> Any:
    """Transformers' own ``sample_frames`` with the processor's defaults."""
    torchvision = pytest.importorskip("hippo.models.loading._torchvision")
    torchvision.ensure_torchvision()
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    processor = Qwen2VLVideoProcessor()

    def indices(total: int, fps: float, plan: FramePlan) -> list[int]:
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        result: list[int] = processor.sample_frames(
            metadata, fps=plan.fps, min_frames=plan.min_frames, max_frames=plan.max_frames
        ).tolist()
        return result

    return indices


def ours(total: int, fps: float, plan: FramePlan) -> list[int]:
    return sampled([i / fps for i in range(total)], total / fps, plan)


def sampled(seconds: list[float], duration_s: float, plan: FramePlan) -> list[int]:
    return sample_frames(seconds, duration_s, count_frames(len(seconds), duration_s, plan))


@pytest.mark.parametrize("fps", [8.0, 10.0, 12.0, 24.0, 24000 / 1001, 25.0, 30.0, 60.0])
@pytest.mark.parametrize("plan_fps", [1.0, 2.0, 4.0])
def test_indices_equal_the_reference_processor(reference: Any, fps: float, plan_fps: float) -> None:
    plan = replace(DEFAULT, fps=plan_fps)
    totals = [*range(2, 130), *random.Random(0).sample(range(130, 20_000), 60)]
    num_equal = 0
    for total in totals:
        expected, actual = reference(total, fps, plan), ours(total, fps, plan)
        num_equal += expected == actual
        # The reference adds up float32 steps: it can be one off where the exact place is a whole
        # number or just below one, and can end with a superfluous index.
        assert len(expected) - len(actual) in (0, 1)
        for place, (theirs, index) in enumerate(zip(expected, actual, strict=False)):
            exact = place * total / len(actual)
            assert theirs == index or abs(exact - round(exact)) < 1e-5 * max(exact, 1.0)
    assert num_equal >= 0.9 * len(totals)


@settings(deadline=None)
@given(
    total=st.integers(1, 5000),
    fps=st.floats(0.5, 120.0),
    plan_fps=st.floats(0.1, 60.0),
    min_frames=st.integers(2, 64),
    more=st.integers(0, 700),
)
def test_counts_are_even_ascending_and_within_the_plan(
    total: int, fps: float, plan_fps: float, min_frames: int, more: int
) -> None:
    plan = FramePlan(fps=plan_fps, min_frames=min_frames, max_frames=min_frames + more)
    indices = ours(total, fps, plan)
    assert len(indices) % 2 == 0
    assert 2 <= len(indices) <= max(2, min(plan.max_frames, total))
    assert indices == sorted(indices)
    assert indices[0] == 0 and indices[-1] < total
    if total >= 2:
        assert len(set(indices)) == len(indices)


def test_an_only_frame_is_taken_twice() -> None:
    assert sampled([0.0], 0.04, DEFAULT) == [0, 0]


def test_a_variable_rate_is_sampled_evenly_in_time() -> None:
    fast = [i / 60 for i in range(120)]  # 2 s
    slow = [2.0 + i for i in range(6)]  # 6 s
    indices = sampled(fast + slow, 8.0, replace(DEFAULT, fps=1.0))
    assert indices == [0, 60, 120, 121, 122, 123, 124, 125]


def test_a_still_of_a_variable_rate_is_on_screen_until_the_next_frame() -> None:
    assert sampled([0.0, 0.1, 3.9], 4.0, replace(DEFAULT, fps=1.0, min_frames=2)) == [0, 1]
    times = [0.0, 0.1, 0.2, 3.9]
    assert sampled(times, 4.0, replace(DEFAULT, fps=1.0, min_frames=2)) == [0, 2, 2, 2]


def test_a_plan_left_open_takes_the_models_defaults_and_the_operators_limit() -> None:
    assert resolve_plan(FramePlan(), DecodeLimits()) == DEFAULT
    assert resolve_plan(FramePlan(), DecodeLimits(max_frames=2)) == FramePlan(2.0, 2, 2)
    plan = FramePlan(fps=0.5, min_frames=6, max_frames=10)
    assert resolve_plan(plan, DecodeLimits()) == plan


@pytest.mark.parametrize(
    ("plan", "field", "legal"),
    [
        (FramePlan(fps=-1.0), "fps", "greater than 0 and at most 240"),
        (FramePlan(fps=1e9), "fps", "greater than 0 and at most 240"),
        (FramePlan(fps=float("nan")), "fps", "greater than 0 and at most 240"),
        (FramePlan(max_frames=65), "max_frames", "1 to 64 frames"),
        (FramePlan(min_frames=-4), "min_frames", "1 to 64 frames"),
        (FramePlan(min_frames=20, max_frames=10), "min_frames", "more than max_frames"),
    ],
)
def test_a_plan_out_of_range_is_refused_with_the_field_and_the_range(
    plan: FramePlan, field: str, legal: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve_plan(plan, DecodeLimits(max_frames=64))
    assert caught.value.param == field
    assert legal in caught.value.message


def test_the_worker_imports_neither_torch_nor_the_models() -> None:
    code = (
        "import sys, hippo.video.worker\n"
        "raise SystemExit(any(name in sys.modules for name in ('torch', 'hippo.models')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_defaults_are_those_of_the_reference(reference: Any) -> None:
    assert reference(200, 25.0, resolve_plan(FramePlan(), DecodeLimits())) == ours(
        200, 25.0, DEFAULT
    )
    assert torch.equal(torch.tensor(ours(16, 8.0, DEFAULT)), torch.arange(0, 16, 4))
