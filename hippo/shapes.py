"""Reads a model's shape from its configuration alone; standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hippo.errors import InvalidRequestError
from hippo.public_models import PUBLIC_CONFIGS
from hippo.sizes import ModelShape


def find_shape(name: str, *, layer_bits: float | None = None) -> ModelShape:
    """Returns the shape of a public model, or of a folder with config.json.

    ``layer_bits`` is ModelShape.layer_bits; by default that of a quantised folder's weight files,
    and otherwise weights are not needed. Raises InvalidRequestError for another name, for an
    unsupported architecture, and if a quantised folder has no weight files.
    """
    if name in PUBLIC_CONFIGS:
        return replace(shape_of(name, PUBLIC_CONFIGS[name]), layer_bits=layer_bits)
    folder = Path(name).expanduser()
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequestError(
            f"{name!r} is neither a folder with config.json nor one of {', '.join(PUBLIC_CONFIGS)}"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from None
    shape = shape_of(folder.resolve().name, config)
    if layer_bits is None and is_kept_quantized(config):
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if not stored:
            raise InvalidRequestError(
                f"{name} is quantised, and has no weight files to tell its size: give "
                "--weights-bits"
            )
        others = shape.num_parameters - shape.num_shared_parameters
        layer_bits = 8 * (stored - 2 * others) / shape.num_shared_parameters
    return replace(shape, layer_bits=layer_bits)


def quantization_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a config.json's settings of quantised weights; None: it has plain weights."""
    text = config.get("text_config") or {}
    settings: dict[str, Any] | None = (
        config.get("quantization_config") or text.get("quantization_config") or None
    )
    return settings


def is_kept_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a GPU that multiplies FP8 keeps a config.json's weights quantised in memory; of
    compressed-tensors' forms only FP8 is, and others are dequantised at load."""
    settings = quantization_settings(config)
    if settings is None or settings.get("quant_method") != "compressed-tensors":
        return settings is not None
    groups = (settings.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    return all((each.get("type"), each.get("num_bits")) == ("float", 8) for each in weights)


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Reads a config.json; raises InvalidRequestError if it is unsupported or incomplete."""
    family = config.get("model_type")
    if family not in ("qwen2_5_vl", "llava_onevision"):
        raise InvalidRequestError(
            f"{name} is of architecture {family!r}; supported: llava_onevision, qwen2_5_vl"
        )
    try:
        return _shape(name, config)
    except KeyError as error:
        raise InvalidRequestError(f"the configuration of {name} lacks {error}") from None


def _shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    text = config.get("text_config") or config  # flat in older repositories
    vision = config["vision_config"]
    is_qwen = config["model_type"] == "qwen2_5_vl"
    width, num_layers, mlp = (
        text["hidden_size"], text["num_hidden_layers"], text["intermediate_size"]
    )  # fmt: skip
    num_heads, num_kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    head_dim = width // num_heads
    is_tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    products = width * (2 * head_dim * (num_heads + num_kv_heads) + 3 * mlp)
    per_layer = products + head_dim * (num_heads + 2 * num_kv_heads) + 2 * width  # biases, norms
    embeddings = text["vocab_size"] * width * (1 if is_tied else 2)
    tower = _qwen_tower(vision, width) if is_qwen else _siglip_tower(vision, width)
    patch = vision["patch_size"]
    num_sides = 0 if is_qwen else vision["image_size"] // patch
    side = math.ceil(num_sides / 2)
    return ModelShape(
        name=name,
        num_parameters=embeddings + num_layers * per_layer + width + tower,
        num_shared_parameters=num_layers * products,
        num_head_parameters=text["vocab_size"] * width,
        is_tied=is_tied,
        num_layers=num_layers,
        hidden_size=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=mlp,
        vision_width=vision["hidden_size"],
        vision_mlp_width=vision["intermediate_size"],
        patch_values=3 * patch**2 * (vision["temporal_patch_size"] if is_qwen else 1),
        patches_per_token=vision["spatial_merge_size"] ** 2 if is_qwen else (num_sides / side) ** 2,
        tokens_per_side=side,
        token_pixels=patch * vision["spatial_merge_size"] if is_qwen else 0,
        token_frames=vision["temporal_patch_size"] if is_qwen else 1,
    )


def _qwen_tower(vision: Mapping[str, Any], width: int) -> int:
    """Counts the parameters of Qwen2.5-VL's vision tower and merger."""
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    patch = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    merged = hidden * vision["spatial_merge_size"] ** 2
    attention = 4 * hidden * hidden + 4 * hidden
    block = 2 * hidden + attention + 3 * hidden * mlp + 2 * mlp + hidden
    merger = hidden + merged * merged + merged + merged * width + width
    return int(patch * hidden + vision["depth"] * block + merger)


def _siglip_tower(vision: Mapping[str, Any], width: int) -> int:
    """Counts the parameters of LLaVA-OneVision's vision tower, projector and newline."""
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    num_patches = (vision["image_size"] // vision["patch_size"]) ** 2
    patch = 3 * vision["patch_size"] ** 2 * hidden + hidden
    block = 4 * hidden + 4 * (hidden * hidden + hidden) + 2 * hidden * mlp + mlp + hidden
    projector = hidden * width + width + width * width + width
    tower = patch + num_patches * hidden + vision["num_hidden_layers"] * block + 2 * hidden
    return int(tower + projector + width)
