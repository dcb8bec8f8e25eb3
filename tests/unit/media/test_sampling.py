"""Which frames are looked at, and their sizes: the reference's, within the budget of tokens."""

import dataclasses
import math
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.errors import ContextLengthError, InvalidRequestError
from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits, fit_frames, fit_size
from hippo.media.sampling import count_frames, resolve_plan, sample_frames
from hippo.models.families.qwen_prompt import frame_limits
from hippo.models.interface.base import DecodedMedia
from hippo.models.prompts.builder import resized
from hippo.service.settings import EngineSettings
from hippo.types import FramePlan, MediaKind
from hippo.video.canvas import Canvas

DEFAULT = FramePlan(fps=2.0, min_frames=4, max_frames=768)


@pytest.fixture(scope="module")
def transformers_processor() -> Any:
    pytest.importorskip("hippo.models.loading._torchvision").ensure_torchvision()
    from transformers.models.qwen2_vl import image_processing_qwen2_vl as images
    from transformers.models.qwen2_vl import video_processing_qwen2_vl as videos

    def make(**size: Any) -> Any:
        video = videos.Qwen2VLVideoProcessor(cap_pixels_per_frame=True, **size)
        image = images.Qwen2VLImageProcessor(**size)
        return SimpleNamespace(image_processor=image, video_processor=video)

    return make


@pytest.fixture(scope="module")
def reference(transformers_processor: Any) -> Any:
    """Transformers' own ``sample_frames`` with the processor's defaults."""
    from transformers.video_utils import VideoMetadata

    processor = transformers_processor().video_processor

    def indices(total: int, fps: float, plan: FramePlan) -> Any:
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        numbers = {"min_frames": plan.min_frames, "max_frames": plan.max_frames}
        return processor.sample_frames(metadata, fps=plan.fps, **numbers).tolist()

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


FAST_THEN_SLOW = [*(i / 60 for i in range(120)), *(2.0 + i for i in range(6))]  # of 2 and 6 s


@pytest.mark.parametrize(
    ("times", "duration_s", "min_frames", "indices"),
    [
        ([0.0], 0.04, 4, [0, 0]),  # an only frame is taken twice
        (FAST_THEN_SLOW, 8.0, 4, [0, 60, 120, 121, 122, 123, 124, 125]),
        ([0.0, 0.1, 3.9], 4.0, 2, [0, 1]),  # a still is on screen until the next frame
        ([0.0, 0.1, 0.2, 3.9], 4.0, 2, [0, 2, 2, 2]),
    ],
)
def test_a_variable_rate_is_sampled_evenly_in_time(
    times: list[float], duration_s: float, min_frames: int, indices: list[int]
) -> None:
    assert sampled(times, duration_s, FramePlan(1.0, min_frames, 768)) == indices


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
    with pytest.raises(InvalidRequestError, match=legal) as caught:
        resolve_plan(plan, DecodeLimits(max_frames=64))
    assert caught.value.param == field


def test_the_worker_imports_neither_torch_nor_the_models() -> None:
    code = (
        "import sys, hippo.video.worker\n"
        "raise SystemExit(any(name in sys.modules for name in ('torch', 'hippo.models')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


QWEN = FrameLimits(
    side_multiple=28,
    video_pixels=(128 * 28 * 28, 768 * 28 * 28),
    image_pixels=(3136, 4096 * 28 * 28),  # the public checkpoints': up to 16,384 tokens
    max_video_tokens=115_200,
)
LLAVA = FrameLimits(num_frames=32, frame_multiple=1, fixed_size=(384, 384), fixed_tokens=196)


def fitted(
    num_frames: int, height: int, width: int, limits: FrameLimits = QWEN, **plan: Any
) -> tuple[int, tuple[int, int]]:
    """The number of frames, and their height and width."""
    resolved = resolve_plan(FramePlan(**plan), DecodeLimits(), limits)
    count = fit_frames(num_frames, height, width, resolved, limits)
    return count, fit_size(count, height, width, resolved, limits)


@pytest.mark.parametrize(
    ("num_frames", "height", "width"),
    [(20, 1080, 1920), (2, 480, 640), (300, 216, 384), (500, 240, 320), (768, 336, 480)],
)
def test_sizes_are_those_of_the_reference(
    transformers_processor: Any, num_frames: int, height: int, width: int
) -> None:
    # transformers has qwen-vl-utils' rule under cap_pixels_per_frame.
    processor = transformers_processor().video_processor
    frames = torch.zeros(1, dtype=torch.uint8).expand(1, num_frames, 1, height, width)
    factors = {"factor": 28, "temporal_factor": 2, "cap_pixels_per_frame": True}
    expected = processor.resize(frames, size=processor.size, resample=processor.resample, **factors)
    assert fitted(num_frames, height, width) == (num_frames, tuple(expected.shape[-2:]))


@settings(deadline=None)
@given(
    num_frames=st.integers(1, 384).map(lambda pairs: 2 * pairs),
    height=st.integers(32, 4320),
    width=st.integers(32, 4320),
    budget=st.integers(300, 150_000),
    num_text=st.sampled_from([0, 11]),
)
def test_videos_stay_within_the_budget(
    num_frames: int, height: int, width: int, budget: int, num_text: int
) -> None:
    limits = dataclasses.replace(QWEN, grid_text_tokens=num_text)
    if not 0.1 < height / width < 10:  # a narrow frame has a side of its own
        return
    count, (rows, columns) = fitted(num_frames, height, width, limits, max_visual_tokens=budget)
    assert 2 <= count <= num_frames and count % 2 == 0
    assert rows % 28 == columns % 28 == 0
    assert count // 2 * (rows * columns // 28**2 + num_text) <= budget
    # Turning the frame, as its rotation may say, changes neither.
    turned = fitted(num_frames, width, height, limits, max_visual_tokens=budget)
    assert turned == (count, (columns, rows))


def test_frames_are_made_smaller_before_they_are_dropped() -> None:
    assert fitted(64, 1080, 1920, max_visual_tokens=6400)[0] == 64
    assert fitted(64, 1080, 1920, max_visual_tokens=1000)[0] < 64
    assert fitted(8, 1080, 1920, max_visual_tokens=128) == (2, (224, 420))


@pytest.mark.parametrize(
    ("limits", "plan", "words"),
    [
        (QWEN, {"max_visual_tokens": 100}, "100 visual tokens of a video, and .* take 120: "),
        (QWEN, {"max_visual_tokens": 126, "min_pixels": 300_000}, "lower min_pixels"),
        (LLAVA, {"max_visual_tokens": 195}, "195 visual tokens of a video, and .* take 196: "),
    ],
)
def test_frames_do_not_become_smaller_than_the_least(
    limits: FrameLimits, plan: dict[str, int], words: str
) -> None:
    with pytest.raises(ContextLengthError, match=words) as caught:
        fitted(8, 1080, 1920, limits, **plan)
    assert caught.value.param == "messages"


def test_the_requests_pixels_count_within_the_limits() -> None:
    assert math.prod(fitted(20, 1080, 1920, max_pixels=200_000)[1]) <= 200_000
    assert fitted(20, 1080, 1920, max_pixels=2**31 - 1)[1] == (560, 1008)
    assert math.prod(fitted(20, 120, 160, min_pixels=300_000)[1]) >= 300_000
    with pytest.raises(InvalidRequestError, match="at most 602112 pixels"):
        fitted(20, 120, 160, min_pixels=700_000)


def test_frames_of_one_size() -> None:
    assert fitted(32, 1080, 1920, LLAVA) == (32, (384, 384))
    assert fitted(32, 1080, 1920, LLAVA, max_visual_tokens=2000)[0] == 10
    for plan in (FramePlan(max_pixels=384 * 384 - 1), FramePlan(min_pixels=384 * 384 + 1)):
        with pytest.raises(InvalidRequestError, match="every frame at 384 x 384"):
            resolve_plan(plan, DecodeLimits(), LLAVA)


def test_numbers_of_frames_are_the_models_and_the_requests() -> None:
    def count(limits: FrameLimits, total: int = 1000, **plan: Any) -> int:
        resolved = resolve_plan(FramePlan(**plan), DecodeLimits(), limits)
        return count_frames(total, total / 25, resolved, limits.frame_multiple)

    assert (count(QWEN), count(LLAVA), count(LLAVA, 20)) == (80, 32, 20)
    assert count(LLAVA, fps=1.0) == 40
    assert count(LLAVA, max_frames=16) == 16
    assert count(LLAVA, min_frames=48) == 48
    assert count(QWEN, num_frames=7) == 8  # as transformers rounds
    assert count(QWEN, num_frames=1) == 2
    assert count(QWEN, max_frames=1) == count(QWEN, fps=5.0, max_frames=3) == 2
    assert count(QWEN, 3, num_frames=8) == 2
    assert count(LLAVA, num_frames=1) == 1
    assert count(QWEN, num_frames=10, fps=5.0) == 10
    with pytest.raises(InvalidRequestError, match="to 768 frames") as caught:
        count(QWEN, num_frames=769)
    assert caught.value.param == "num_frames"


def test_limits_for_images_are_not_those_of_videos(transformers_processor: Any) -> None:
    public = transformers_processor(min_pixels=3136, max_pixels=12845056)
    assert frame_limits(public) == QWEN
    own = frame_limits(transformers_processor(min_pixels=3136, max_pixels=602112))
    assert own.video_pixels == own.image_pixels == (3136, 602112)


def test_an_operators_limits_replace_the_models() -> None:
    ours = EngineSettings(model="m", video_fps=1.0, max_video_pixels=50_000, max_image_pixels=9000)
    limits = ours.frame_limits(QWEN)
    assert (limits.fps, limits.video_pixels) == (1.0, (50_000, 50_000))
    assert limits.image_pixels == (3136, 9000)
    assert EngineSettings(model="m", video_fps=1.0).frame_limits(LLAVA).num_frames == 0


@pytest.mark.parametrize("size", [(561, 1009), (270, 480), (90, 61)])
def test_the_worker_resizes_as_the_processors_do(size: tuple[int, int]) -> None:
    pytest.importorskip("hippo.models.loading._torchvision").ensure_torchvision()
    frames = torch.randint(0, 256, (2, *size, 3), dtype=torch.uint8)
    item = DecodedMedia(MediaKind.VIDEO, frames, (0.0, 0.5), 2.0)
    expected = resized(item, FramePlan(), QWEN)
    assert expected.is_resized
    assert resized(expected, FramePlan(), QWEN) is expected
    canvas = Canvas(FramePlan(), DecodeLimits(), QWEN, lambda *_: np.zeros((), np.uint8))
    pixels = np.zeros(expected.frames.shape, np.uint8)
    for frame, target in zip(frames.numpy(), pixels, strict=True):
        canvas.draw(frame, target)
    assert np.abs(pixels.astype(int) - expected.frames.numpy()).max() <= 2
