"""What loading and reading a prompt take at most is what was computed."""

import dataclasses
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hippo.catalog.shapes import find_shape
from hippo.catalog.sizes import SCORED_ROWS, VISION_PATCHES
from hippo.cli.stack import BUNDLED_PAIR
from hippo.errors import ModelLoadError
from hippo.models.attention.cache import cache_dtype
from hippo.models.interface.base import AttentionTap, DecodedMedia
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading import memory
from hippo.models.loading.placement import DTYPES
from tests.support.devices.pretend_cuda import pretended_device
from tests.support.devices.tensor_trace import TensorTrace
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.families import write_family
from tests.support.models.hub_forms import write_hub_form
from tests.support.models.reference import clip, image, prepare, user


def test_the_host_must_hold_what_is_read_to_a_gpu(
    target_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def available(device: torch.device) -> int:
        return 64 << 30 if device.type == "cuda" else 1000

    monkeypatch.setattr(memory, "available_bytes", available)
    with (
        pretended_device(),
        pytest.raises(ModelLoadError, match=r"weights takes about .* of this machine's own memory"),
    ):
        load_model(LoadPlan(str(target_checkpoint), device="cuda", max_context_length=64))


PEAK_SCRIPT = """
import gc, importlib, sys, threading
import psutil
from hippo.models.loading._torchvision import ensure_torchvision
ensure_torchvision()
importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
importlib.import_module("transformers.models.auto.processing_auto")
import torch
from hippo.models.loading import pretrained
from hippo.models.load import load_model
from hippo.models.interface.plan import LoadPlan

def check(dtype, counts_files):
    def resident():
        memory = process.memory_info()
        return memory.rss - (0 if counts_files else memory.shared)

    def watch():
        while not ended.wait(0.002):
            peaks.append(resident())

    ended, peaks, seen = threading.Event(), [], []
    pretrained.check_fits = lambda plan, needs: (seen.append(needs), check_fits(plan, needs))
    gc.collect()  # a model that was loaded before
    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        load_model(LoadPlan(sys.argv[1], dtype=dtype, max_context_length=256))
    finally:
        ended.set()
        watcher.join()
    (needs,) = seen
    held, peak = needs.weight_bytes, max(peaks) - before
    computed = held + needs.slot_bytes + max(needs.work_bytes, needs.packing_bytes)
    # Above the weights, 32 MiB are for code that torch loads at the first packing, and fragments.
    assert 0.5 * held < peak < computed + (32 << 20), (dtype, held, peak, computed)

process, check_fits = psutil.Process(), pretrained.check_fits
check("bfloat16", counts_files=True)  # with the pages of the mapped weight files
check("float32", counts_files=False)  # the files are read, converted, and closed
check("float16", counts_files=False)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_loading_takes_no_more_than_what_was_checked(tmp_path: Path) -> None:
    large = write_checkpoint(  # 100 MB in seven files, in bfloat16
        tmp_path / "model",
        num_layers=2,
        num_heads=16,
        head_dim=64,
        intermediate_size=4096,
        vocab_size=10_000,
        dtype=torch.bfloat16,
        max_shard_size="15MB",
    )
    environment = {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, str(large)],
        env=environment | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


CPU = torch.device("cpu")
LONG_QUESTION = "what is in the thing? " * 40  # scores by as many rows as at most
LARGE = image(height=980, width=980)
LAYERS = AttentionTap(2), AttentionTap(2, "causal"), AttentionTap(1, is_alignment=True)


def bundled(_: Path) -> Path:
    return BUNDLED_PAIR / "draft"


@pytest.mark.parametrize(
    ("write", "question", "media", "tap", "dtype", "least"),
    [
        *(
            (bundled, LONG_QUESTION, clip(num_frames=24, size=280), tap, dtype, 0)
            for dtype in ("float32", "bfloat16")
            for tap in LAYERS
        ),
        *((bundled, "what?", LARGE, None, dtype, 0.5) for dtype in ("float32", "bfloat16")),
        *(
            (partial(write_checkpoint, family=family, vision=vision), "what?", LARGE, None,
             "bfloat16", 0.5)
            for family, vision in (
                ("qwen2_vl", {"embed_dim": 256, "mlp_ratio": 4, "num_heads": 4}),
                ("qwen3_vl", {"hidden_size": 256, "intermediate_size": 1024, "num_heads": 4}),
                ("qwen3_vl", {}),  # narrow: its pixels are wider than its layers
            )
        ),
        *(
            (partial(write_family, family=family), LONG_QUESTION, clip(num_frames=60),
             AttentionTap(3), "float32", 0)
            for family in ("llava_onevision", "qwen3_vl_moe")
        ),
        *(
            (partial(write_hub_form, name=f"OpenGVLab/InternVL3_5-{size}-HF"), "what?",
             clip(num_frames=4, size=448), AttentionTap(2), "float32", 0.4)
            for size in ("1B", "38B")
        ),
    ],
)  # fmt: skip
def test_videos_and_images_are_read_within_the_margin(
    write: Callable[[Path], Path],
    question: str,
    media: DecodedMedia,
    tap: AttentionTap | None,
    dtype: str,
    least: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on a GPU, for which the margin is made.
    monkeypatch.setattr("hippo.models.families.family.CPU_VISION_PATCHES", VISION_PATCHES)
    folder = write(tmp_path / "model")
    model: Any = load_model(LoadPlan(str(folder), dtype=dtype, max_context_length=8192))
    limits = dataclasses.replace(model.frame_limits, image_pixels=(0, 1 << 30))
    model._prompts.frame_limits = limits
    prompt = prepare(model, user(0, question), media)
    assert question != LONG_QUESTION or prompt.question_indices.shape[0] > SCORED_ROWS

    with TensorTrace() as trace:
        visual = model.embed_visual(prompt)
        deque(model.prefill(0, prompt, visual, None, tap and dataclasses.replace(tap)), maxlen=1)
    working = DTYPES[dtype]
    margin = find_shape(str(folder)).work_bytes(
        prompt.length, bytes_each=working.itemsize, cache_each=cache_dtype(working, CPU).itemsize
    )
    assert least <= trace.peak_bytes / margin <= 1, "the peak of a whole prefill by its margin"
