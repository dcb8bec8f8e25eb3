"""Quantised checkpoints load, answer as transformers does on the same weights, and roll back."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from hippo.errors import ModelLoadError
from hippo.models import memory
from hippo.models.loading import load_model
from hippo.models.plan import LoadPlan
from tests.support.quantized import AWQ_CONFIG, FORMS, GPTQ_CONFIG, add_config, write_quantized
from tests.support.reference import Reference, assert_close, clip, prefill, prepare, step, user
from tests.support.hub_forms import write_hub_form

QWEN = "Qwen/Qwen2.5-VL-72B-Instruct"
LLAVA = "llava-hf/llava-onevision-qwen2-72b-ov-hf"
KEPT = "unsloth bnb-4bit", "LLM.int8()"
EXACT = [form for form in FORMS if form != "LLM.int8()"]


def load(folder: Path, **changes: object) -> memory_model:
    plan = LoadPlan(str(folder), dtype="float32", max_context_length=1024, **changes)
    return load_model(plan)
