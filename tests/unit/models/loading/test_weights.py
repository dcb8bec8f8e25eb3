"""Weights are read once, with progress, into the memory that was computed, and all are used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hippo.errors import ModelLoadError
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.models.loading import memory
from tests.support.devices.pretend_cuda import pretended_device
from tests.support.models.checkpoints import write_checkpoint


def load(folder: Path) -> None:
    load_model(LoadPlan(str(folder), max_context_length=64))


@pytest.fixture
def copy(target_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target_checkpoint, tmp_path / "copy"))


def change_weights(folder: Path, *, drop: str = "none", **added: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    weights = {key: value for key, value in load_file(path).items() if not key.endswith(drop)}
    save_file(weights | {key.replace("__", "."): value for key, value in added.items()}, path,
              metadata={"format": "pt"})  # fmt: skip


def test_a_weight_that_no_module_takes_is_an_error(copy: Path) -> None:
    change_weights(copy, model__language_model__layers__0__mlp__gate__weight=torch.zeros(2))
    with pytest.raises(ModelLoadError, match=r"not in the model: .*layers\.0\.mlp\.gate\.weight"):
        load(copy)


def test_buffers_of_older_versions_and_scales_of_activations_are_left_out(copy: Path) -> None:
    change_weights(
        copy,
        model__language_model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8),
        model__language_model__layers__0__self_attn__q_proj__input_scale=torch.ones(1),
        model__language_model__layers__0__self_attn__k_scale=torch.ones(1),
    )
    load(copy)


def test_progress_is_reported_weight_by_weight(target_checkpoint: Path) -> None:
    shares: list[float] = []
    load_model(
        LoadPlan(str(target_checkpoint), max_context_length=64),
        progress=lambda stage, share: shares.append(share),
    )
    assert shares == sorted(shares)
    assert len([share for share in shares if 0.1 < share < 0.8]) > 50


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
import gc, importlib, json, sys, threading
from hippo.models.loading._torchvision import ensure_torchvision
ensure_torchvision()
importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
importlib.import_module("transformers.models.auto.processing_auto")
import torch
from hippo.models.loading import pretrained
from hippo.models.load import load_model
from hippo.models.interface.plan import LoadPlan

def resident(*names):
    lines = open("/proc/self/status").read().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[name].split()[0]) * 1024 for name in names)

def sizes_of(folder, dtype, names):
    def watch():
        while not ended.wait(0.002):
            peaks.append(resident(*names))

    ended, peaks, seen = threading.Event(), [], []
    pretrained.check_fits = lambda plan, needs: (seen.append(needs), check_fits(plan, needs))
    gc.collect()  # a model that was loaded before
    before = resident(*names)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        load_model(LoadPlan(folder, dtype=dtype, max_context_length=256))
    finally:
        ended.set()
        watcher.join()
    (needs,) = seen
    return {
        "weights": needs.weight_bytes,
        "computed": needs.weight_bytes + needs.slot_bytes + needs.work_bytes,
        "peak": max(peaks) - before,
    }

check_fits = pretrained.check_fits
print(json.dumps({
    dtype: sizes_of(sys.argv[1], dtype, names)
    for dtype, names in json.loads(sys.argv[2]).items()
}))
"""

MEMORY = {  # by dtype: what counts as memory of the process
    "bfloat16": ("RssAnon", "RssFile"),  # with the pages of the mapped weight files
    "float32": ("RssAnon",),  # the files are read, converted, and closed
    "float16": ("RssAnon",),
}


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 MB in seven files, in bfloat16."""
    return write_checkpoint(
        tmp_path_factory.mktemp("large") / "model",
        num_layers=2,
        num_heads=16,
        head_dim=64,
        intermediate_size=4096,
        vocab_size=10_000,
        dtype=torch.bfloat16,
        max_shard_size="15MB",
    )


@pytest.fixture(scope="module")
def loaded_sizes(large_checkpoint: Path) -> dict[str, dict[str, int]]:
    """By dtype: bytes of the weights, what was checked to be there, and the most that was held."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc")
    done = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, str(large_checkpoint), json.dumps(MEMORY)],
        env={
            "MALLOC_MMAP_THRESHOLD_": "1000000",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    sizes: dict[str, dict[str, int]] = json.loads(done.stdout)
    return sizes


@pytest.mark.parametrize("dtype", MEMORY)
def test_loading_takes_no_more_than_what_was_checked(
    loaded_sizes: dict[str, dict[str, int]], dtype: str
) -> None:
    sizes = loaded_sizes[dtype]
    # Above the weights, 32 MiB are for code that torch loads at the first packing, and fragments.
    assert 0.5 * sizes["weights"] < sizes["peak"] < sizes["computed"] + (32 << 20), sizes
