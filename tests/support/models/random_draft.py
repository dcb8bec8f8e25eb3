"""A draft that is never right: the bundled draft's shape with random weights."""

import shutil
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def write_random_draft(draft: Path, folder: Path, *, seed: int = 0) -> Path:
    """Writes a checkpoint of ``draft``'s configuration and tokenizer with weights drawn anew."""
    generator = np.random.default_rng(seed)
    shutil.copytree(draft, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with safe_open(draft / "model.safetensors", framework="numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    # Norms too: with tied embeddings a model that is random otherwise repeats its last token.
    weights = {
        name: generator.normal(scale=0.2, size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
