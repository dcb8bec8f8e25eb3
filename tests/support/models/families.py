"""A small random checkpoint of each model family."""

from pathlib import Path
from typing import Any

from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.internvl import write_internvl_checkpoint
from tests.support.models.llava import ORDERED_TEMPLATE, write_llava_checkpoint

QWEN_FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)
HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Some of their layers have a state in place of keys and values."""

ALL_FAMILIES = (*QWEN_FAMILIES, "llava_onevision", "internvl")
ORDERED_LLAVA = "llava_onevision, parts in order"


def write_family(folder: Path, family: str, **saved: Any) -> Path:
    """Saves a checkpoint of ``family`` (a ``model_type``, or ORDERED_LLAVA); ``saved`` are
    arguments of save_random."""
    if family in QWEN_FAMILIES:
        return write_checkpoint(folder, family=family, **saved)
    if family == "internvl":
        return write_internvl_checkpoint(folder, **saved)
    templates = {"chat_template": ORDERED_TEMPLATE} if family == ORDERED_LLAVA else {}
    return write_llava_checkpoint(folder, **templates, **saved)
