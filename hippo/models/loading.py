"""From a name to a model that can serve: load_model and the registry of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hippo.errors import ModelLoadError
from hippo.models.base import VideoLanguageModel
from hippo.models.batch import MAX_GROUPED_ROWS
from hippo.models.checkpoint import Checkpoint, Progress, find_checkpoint
from hippo.models.linear import has_half_linear

if TYPE_CHECKING:
    from hippo.parallel.shards import Shards

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def _load_qwen2_5_vl(*args: Any, **kwargs: Any) -> VideoLanguageModel:
    from hippo.models.qwen2_5_vl import load

    return load(*args, **kwargs)


def _load_llava_onevision(*args: Any, **kwargs: Any) -> VideoLanguageModel:
    from hippo.models.llava_onevision import load

    return load(*args, **kwargs)


FAMILIES: Mapping[str, Callable[..., VideoLanguageModel]] = MappingProxyType(
    {"llava_onevision": _load_llava_onevision, "qwen2_5_vl": _load_qwen2_5_vl}
)
"""Loader of each supported architecture, by the ``model_type`` of its config.json."""


def load_model(
    name_or_path: str,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    num_slots: int | None = 1,
    max_context_length: int = 4096,
    served_name: str | None = None,
    progress: Progress | None = None,
    is_fused: bool = True,
    shards: Shards | None = None,
    reserved_bytes: int = 0,
    budget_bytes: int | None = None,
    cuda_graphs: str = "off",
    exact_rows: int | None = None,
    auto_is_half: bool = False,
) -> VideoLanguageModel:
    """Loads a checkpoint from a folder or the Hugging Face hub, ready to serve.

    ``dtype`` is float32, bfloat16, float16 (on a CPU: weights in float16, arithmetic in float32)
    or auto: the checkpoint's own, or with ``auto_is_half`` float16 on a CPU (float32 where that
    cannot multiply it). ``is_fused`` False runs transformers' modules as they are.
    ``num_slots`` None: as many as fit. ``shards``: load one rank's part, on its device
    (hippo.parallel). ``reserved_bytes`` of the device are for something else (earlier media);
    ``budget_bytes`` bound what the process takes of it. ``cuda_graphs`` captures steps: auto (on a
    GPU that is not one of several), on or off. ``exact_rows``: every step has that many rows, so
    that a token's logits do not depend on what was fed with it (hippo.models.static).
    Raises ModelLoadError when the checkpoint is missing, gated, unreachable, damaged, of an
    unsupported architecture or too large for the device, or when it cannot be run so.
    """
    report = progress or (lambda _stage, _share: None)
    target = parse_device(device)
    if (num_slots is not None and num_slots < 1) or max_context_length < 2:
        raise ModelLoadError(
            f"--slots {num_slots} and --max-context-length {max_context_length}: there must be at "
            "least 1 slot of 2 tokens"
        )
    has_graphs = _has_graphs(cuda_graphs, target, shards)
    if exact_rows is not None and not 1 <= exact_rows <= MAX_GROUPED_ROWS:
        raise ModelLoadError(f"{exact_rows} rows a step: it must be 1 to {MAX_GROUPED_ROWS}")
    if exact_rows is not None and shards is not None:
        raise ModelLoadError("steps of fixed shape are for a model on one device")
    if dtype not in (*DTYPES, "auto"):
        raise ModelLoadError(f"dtype {dtype!r} is unknown: use {', '.join(DTYPES)} or auto")
    checkpoint = find_checkpoint(name_or_path, progress=report)
    loader = FAMILIES.get(checkpoint.model_type)
    if loader is None:
        raise ModelLoadError(
            f"{checkpoint.name} is of architecture {checkpoint.model_type or 'unknown'!r}; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    chosen = _dtype(dtype, checkpoint, target, auto_is_half=auto_is_half)
    if target.type == "cuda":
        # From Hopper on torch prefers cuDNN's attention, which makes a plan of some 30 ms for each
        # length that it meets: for every step of an answer.
        torch.backends.cuda.enable_cudnn_sdp(False)
    report("loading", 0.0)
    model = loader(
        checkpoint,
        device=target,
        dtype=chosen,
        num_slots=num_slots,
        max_context_length=max_context_length,
        served_name=served_name or checkpoint.name,
        progress=report,
        is_fused=is_fused,
        shards=shards,
        reserved_bytes=reserved_bytes,
        budget_bytes=budget_bytes,
        has_graphs=has_graphs,
        exact_rows=exact_rows,
    )
    report("loading", 1.0)
    return model


def _has_graphs(setting: str, device: torch.device, shards: Shards | None) -> bool:
    if setting not in ("auto", "on", "off"):
        raise ModelLoadError(f"cuda_graphs {setting!r} is unknown: use auto, on or off")
    can_capture = device.type == "cuda" and shards is None
    if setting == "on" and not can_capture:
        reason = "on several devices" if shards is not None else f"on {device}"
        raise ModelLoadError(f"--cuda-graphs on cannot be for a model {reason}: use auto or off")
    return can_capture and setting != "off"


def parse_device(name: str) -> torch.device:
    """The device of that name; raises ModelLoadError when it is unknown or not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device {name!r} is unknown: use cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = f"only {count} CUDA devices are here" if count else "no CUDA device is here"
            raise ModelLoadError(f"device {name!r} cannot be used: {found}; use cpu")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ModelLoadError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    return device


def _dtype(
    name: str, checkpoint: Checkpoint, device: torch.device, *, auto_is_half: bool
) -> torch.dtype:
    if name != "auto":
        dtype = DTYPES[name]
    elif auto_is_half and device.type == "cpu":
        dtype = torch.float16
    else:
        text = checkpoint.config.get("text_config") or {}
        own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        own = own or text.get("dtype") or text.get("torch_dtype") or "float32"
        dtype = DTYPES.get(str(own).removeprefix("torch."), torch.float32)
    if dtype == torch.float16 and device.type == "cpu" and not has_half_linear():
        if name == "float16":
            raise ModelLoadError(
                "float16 on a CPU needs torch's fbgemm, which this machine lacks: use bfloat16 or "
                "float32"
            )
        dtype = torch.float32
    return dtype
