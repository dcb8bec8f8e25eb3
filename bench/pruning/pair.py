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


def cache_bytes_per_token(model_folder: Path) -> int:
    """Of keys and values in float32."""
    text = _text_config(model_folder)
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    return int(2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head_dim * 4)


def _text_config(model_folder: Path) -> dict[str, Any]:
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config", config)
    return text
