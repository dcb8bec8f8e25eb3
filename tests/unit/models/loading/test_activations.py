"""The margin for activations has room for what reading a prompt takes."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import SCORED_ROWS
from hippo.cli.stack import BUNDLED_PAIR
from hippo.models.attention.cache import cache_dtype
from hippo.models.interface.base import AttentionTap, DecodedMedia
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading.placement import DTYPES
from tests.support.devices.tensor_trace import peak_bytes
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.families import write_family
from tests.support.models.hub_forms import write_hub_form
from tests.support.models.reference import clip, image, prepare, user

CPU = torch.device("cpu")
LONG_QUESTION = "what is in the thing? " * 40  # scores by as many rows as at most
LARGE = image(height=980, width=980)
LAYERS = AttentionTap(2), AttentionTap(2, "causal"), AttentionTap(1, is_alignment=True)


def measured(
    folder: Path, question: str, media: DecodedMedia, tap: AttentionTap | None, dtype: str
) -> float:
    """The peak of a whole prefill as a share of its margin."""
    model: Any = load_model(LoadPlan(str(folder), dtype=dtype, max_context_length=8192))
    limits = dataclasses.replace(model.frame_limits, image_pixels=(0, 1 << 30))
    model._prompts.frame_limits = limits
    prompt = prepare(model, user(0, question), media)
    assert question != LONG_QUESTION or prompt.question_indices.shape[0] > SCORED_ROWS

    def read() -> None:
        visual = model.embed_visual(prompt)
        deque(model.prefill(0, prompt, visual, None, tap and dataclasses.replace(tap)), maxlen=1)

    working = DTYPES[dtype]
    margin = find_shape(str(folder)).work_bytes(
        prompt.length,
        bytes_each=working.itemsize,
        cache_each=cache_dtype(working, CPU).itemsize,
    )
    return peak_bytes(read, CPU) / margin


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_draft_reads_videos_and_images_within_the_margin(dtype: str) -> None:
    folder = BUNDLED_PAIR / "draft"
    for tap in LAYERS:
        assert measured(folder, LONG_QUESTION, clip(num_frames=24, size=280), tap, dtype) <= 1
    assert 0.5 <= measured(folder, "what?", LARGE, None, dtype) <= 1


@pytest.mark.parametrize(
    ("family", "vision"),
    [
        ("qwen2_vl", {"embed_dim": 256, "mlp_ratio": 4, "num_heads": 4}),
        ("qwen3_vl", {"hidden_size": 256, "intermediate_size": 1024, "num_heads": 4}),
        ("qwen3_vl", {}),  # narrow: its pixels are wider than its layers
    ],
)
def test_each_qwen_tower_reads_images_within_the_margin(
    family: str, vision: dict[str, int], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", family=family, vision=vision)
    assert 0.5 <= measured(folder, "what?", LARGE, None, "bfloat16") <= 1


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl_moe"])
def test_other_families_read_long_videos_within_the_margin(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", family)
    video = clip(num_frames=60)
    assert measured(folder, LONG_QUESTION, video, AttentionTap(3), "float32") <= 1


@pytest.mark.parametrize("name", ["OpenGVLab/InternVL3_5-1B-HF", "OpenGVLab/InternVL3_5-38B-HF"])
def test_internvls_towers_read_videos_within_the_margin(name: str, tmp_path: Path) -> None:
    folder = write_hub_form(tmp_path / "model", name)
    video = clip(num_frames=4, size=448)
    assert 0.4 <= measured(folder, "what?", video, AttentionTap(2), "float32") <= 1


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
