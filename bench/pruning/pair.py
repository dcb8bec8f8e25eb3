"""Facts of a checkpoint, read without loading it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def fingerprint(model_folder: Path) -> str:
    """Returns the beginning of the SHA-256 of a checkpoint's weights."""
    with (model_folder / "model.safetensors").open("rb") as weights:
        return hashlib.file_digest(weights, "sha256").hexdigest()[:12]


def num_layers(model_folder: Path) -> int:
    """Returns the number of decoder layers of the language model."""
    return int(_text_config(model_folder)["num_hidden_layers"])


def _text_config(model_folder: Path) -> dict[str, Any]:
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config", config)
    return text
