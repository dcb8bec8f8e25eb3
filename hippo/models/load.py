"""Loads a model by name: load_model and the registry of families."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from hippo.errors import ModelLoadError
from hippo.models.cached import CachedModel
from hippo.models.families.family import Family
from hippo.models.families.internvl import INTERNVL
from hippo.models.families.llava_onevision import LLAVA_ONEVISION
from hippo.models.families.qwen_vl import (
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.checkpoint import Checkpoint, Progress, find_checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.loading.placement import device_of
from hippo.models.loading.pretrained import Pretrained, build, read_model
from hippo.models.loading.quantization import find_quantization
from hippo.models.loading.resolve import resolve

if TYPE_CHECKING:
    from hippo.models.products.shards import Shards


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "internvl": INTERNVL,
        "llava_onevision": LLAVA_ONEVISION,
        "qwen2_5_vl": QWEN2_5_VL,
        "qwen2_vl": QWEN2_VL,
        "qwen3_5": QWEN3_5,
        "qwen3_5_moe": QWEN3_5_MOE,
        "qwen3_vl": QWEN3_VL,
        "qwen3_vl_moe": QWEN3_VL_MOE,
    }
)
"""By the ``model_type`` of a checkpoint's config.json."""

_READ_FROM, _READ_TO = 0.1, 0.8  # the part of "loading" in which weights are read


def load_model(
    plan: LoadPlan, *, progress: Progress | None = None, shards: "Shards | None" = None
) -> VideoLanguageModel:
    """Loads a checkpoint from a folder or the Hugging Face hub, ready to serve: all choices are
    made, then the weights are read, then the model is built.

    With ``shards``, loads one rank's part on that rank's device (hippo.parallel). Raises
    ModelLoadError if the checkpoint is missing, gated, unreachable, damaged, of an unsupported
    architecture or too large for the device, or if the device is not available.
    """
    model = CachedModel(*load_parts(plan, progress=progress, shards=shards))
    if progress is not None:
        progress("loading", 1.0)
    return model


def load_parts(
    plan: LoadPlan, *, progress: Progress | None = None, shards: "Shards | None" = None
) -> tuple[Pretrained, Family]:
    """Returns what load_model makes a model of: the loaded checkpoint, and its family."""
    report = progress or (lambda _stage, _share: None)
    device = device_of(plan, shards)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # packages ask what this device can, and launch there
        # From Hopper on, torch prefers cuDNN's attention, which plans for about 30 ms at each new
        # length, that is, in every step of an answer.
        torch.backends.cuda.enable_cudnn_sdp(False)
    checkpoint = find_checkpoint(
        plan.model, progress=report, check=partial(check_form, plan, device)
    )
    report("loading", 0.0)
    family = FAMILIES[checkpoint.model_type]
    resolved = resolve(plan, checkpoint, family.architecture, shards)
    weights = read_model(
        resolved, lambda share: report("loading", _READ_FROM + (_READ_TO - _READ_FROM) * share)
    )
    return build(resolved, weights), family


def check_form(plan: LoadPlan, device: torch.device, checkpoint: Checkpoint) -> None:
    """Raises ModelLoadError if a checkpoint cannot be served as planned because of its architecture
    or its form of quantisation, or because a package is missing here."""
    if checkpoint.model_type not in FAMILIES:
        raise ModelLoadError(
            f"{checkpoint.name} is of architecture {checkpoint.model_type or 'unknown'!r}; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    check_configuration = FAMILIES[checkpoint.model_type].check_configuration
    if check_configuration is not None:
        check_configuration(checkpoint, plan)
    find_quantization(plan, checkpoint, device)
