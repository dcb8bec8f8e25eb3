"""Facts of a checkpoint that need not be loaded for them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def fingerprint(model_folder: Path) -> str:
    """Names a checkpoint by its weights."""
    with (model_folder / "model.safetensors").open("rb") as weights:
        return hashlib.file_digest(weights, "sha256").hexdigest()[:12]


def num_layers(model_folder: Path) -> int:
    """Decoder layers of the language model."""
    return int(_text_config(model_folder)["num_hidden_layers"])


def _text_config(model_folder: Path) -> dict[str, Any]:
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config", config)
    return text
