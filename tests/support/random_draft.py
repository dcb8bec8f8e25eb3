"""A draft that is never right: the bundled draft's shape with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def write_random_draft(draft: Path, folder: Path, *, seed: int = 0) -> Path:
    """Writes a checkpoint of ``draft``'s configuration and tokenizer with weights drawn anew."""
    from hippo.models._torchvision import ensure_torchvision

    ensure_torchvision()
    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    model_class: Any = Qwen2_5_VLForConditionalGeneration
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(AutoConfig.from_pretrained(draft))
        # Untied in effect: with tied embeddings a random model just repeats its last token.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    shutil.copytree(draft, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
