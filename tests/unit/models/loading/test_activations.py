"""What a prompt takes to be read is what is worked out from the configuration."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import SCORED_ROWS
from hippo.cli.stack import BUNDLED_PAIR
from hippo.models.attention.cache import cache_dtype
from hippo.models.interface.base import AttentionTap, DecodedMedia, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading.placement import DTYPES
from tests.support.devices.tensor_trace import peak_bytes
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.hub_forms import write_hub_form
from tests.support.models.reference import clip, image, prepare, user

CPU = torch.device("cpu")


LONG_QUESTION = "what is in the thing? " * 40  # scores by as many rows as at most


def measured(
    model: VideoLanguageModel, question: str, media: DecodedMedia, tap: AttentionTap | None = None
) -> tuple[int, int]:
    """The peak of a whole prefill, of a video with scores, and the prompt's length."""
    prompt = prepare(model, user(0, question), media)
    assert question != LONG_QUESTION or prompt.question_indices.shape[0] > SCORED_ROWS

    def read() -> None:
        visual = model.embed_visual(prompt)
        deque(model.prefill(0, prompt, visual, None, tap and dataclasses.replace(tap)), maxlen=1)

    return peak_bytes(read, CPU), prompt.length


def computed(folder: Path, num_tokens: int, dtype: str) -> int:
    working = DTYPES[dtype]
    return find_shape(str(folder)).work_bytes(
        num_tokens, bytes_each=working.itemsize, cache_each=cache_dtype(working, CPU).itemsize
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_videos_and_images_take_what_is_computed_and_little_less(dtype: str) -> None:
    folder = BUNDLED_PAIR / "draft"
    model = load_model(LoadPlan(str(folder), dtype=dtype, max_context_length=8192))
    processor = model._prompts._processor  # type: ignore[attr-defined]
    processor.video_processor.size["longest_edge"] = 1 << 30
    processor.image_processor.size["longest_edge"] = 1 << 30
    taps = AttentionTap(2), AttentionTap(2, "causal"), AttentionTap(1, is_alignment=True)
    for tap in taps:
        peak, num_tokens = measured(model, LONG_QUESTION, clip(num_frames=24, size=280), tap)
        assert peak <= computed(folder, num_tokens, dtype)
    peak, num_tokens = measured(model, "what?", image(height=980, width=980))
    assert peak <= computed(folder, num_tokens, dtype) <= 1.3 * peak


@pytest.mark.parametrize(
    ("family", "vision"),
    [
        ("qwen2_vl", {"embed_dim": 256, "mlp_ratio": 4, "num_heads": 4}),
        ("qwen3_vl", {"hidden_size": 256, "intermediate_size": 1024, "num_heads": 4}),
        ("qwen3_vl", {}),  # narrow: its pixels are wider than its layers
    ],
)
def test_images_of_each_tower_take_what_is_computed(
    family: str, vision: dict[str, int], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", family=family, vision=vision)
    model = load_model(LoadPlan(str(folder), dtype="bfloat16", max_context_length=2048))
    limits = replace(model.frame_limits, image_pixels=(0, 1 << 30))
    model._prompts.frame_limits = limits  # type: ignore[attr-defined]
    peak, num_tokens = measured(model, "what?", image(height=980, width=980))
    assert num_tokens > 900
    assert peak <= computed(folder, num_tokens, "bfloat16") <= 1.3 * peak


def test_a_long_video_passes_the_tower_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BUNDLED_PAIR / "draft"
    model = load_model(LoadPlan(str(folder), dtype="float32", max_context_length=2048))
    prompt = prepare(model, user(0, "what?"), clip(num_frames=32, size=112))
    whole = model.embed_visual(prompt)
    peak = peak_bytes(lambda: model.embed_visual(prompt), CPU)
    num_patches = int(prompt.visual_indices.shape[0]) * 4
    monkeypatch.setattr("hippo.models.families.qwen_vl.VISION_PATCHES", num_patches // 4)
    parts = model.embed_visual(prompt)
    assert whole is not None and parts is not None
    torch.testing.assert_close(parts, whole)
    assert peak_bytes(lambda: model.embed_visual(prompt), CPU) < 0.4 * peak


def test_llava_onevisions_frames_take_no_more_than_is_computed(llava_checkpoint: Path) -> None:
    model = load_model(LoadPlan(str(llava_checkpoint), dtype="float32", max_context_length=4096))
    peak, num_tokens = measured(
        model, LONG_QUESTION, clip(num_frames=200), AttentionTap(model.num_layers)
    )
    assert peak <= computed(llava_checkpoint, num_tokens, "float32") <= 1.6 * peak


@pytest.mark.parametrize("name", ["OpenGVLab/InternVL3_5-1B-HF", "OpenGVLab/InternVL3_5-38B-HF"])
def test_internvls_towers_take_what_is_computed_and_little_less(name: str, tmp_path: Path) -> None:
    folder = write_hub_form(tmp_path / "model", name)
    model = load_model(LoadPlan(str(folder), dtype="float32", max_context_length=2048))
    peak, num_tokens = measured(
        model, "what?", clip(num_frames=4, size=448), AttentionTap(model.num_layers)
    )
    assert peak <= computed(folder, num_tokens, "float32") <= 1.25 * peak


def test_experts_take_no_more_than_is_computed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family="qwen3_vl_moe")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["num_experts_per_tok"] = 8  # so that experts take more than attention
    path.write_text(json.dumps(config))
    model = load_model(LoadPlan(str(folder), dtype="float32", max_context_length=4096))
    prompt = prepare(model, user(LONG_QUESTION))

    def read() -> None:
        deque(model.prefill(0, prompt, None, None), maxlen=1)

    shape = find_shape(str(folder))
    shape = replace(shape, tower=replace(shape.tower, patches_per_token=0, feature_parts=0))
    planned = shape.work_bytes(prompt.length, bytes_each=4, cache_each=4)
    peak = peak_bytes(read, CPU)
    assert peak <= planned <= 1.2 * peak
