"""Reads a model's shape from its configuration alone; standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hippo.errors import InvalidRequestError
from hippo.public_models import PUBLIC_CONFIGS, PUBLIC_TOWERS
from hippo.sizes import Experts, ModelShape


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
    if family not in _TOWERS:
        raise InvalidRequestError(
            f"{name} is of architecture {family!r}; supported: {', '.join(sorted(_TOWERS))}"
        )
    try:
        return _shape(name, config)
    except KeyError as error:
        raise InvalidRequestError(f"the configuration of {name} lacks {error}") from None


def _shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    text = config.get("text_config") or config  # flat in older repositories
    width, num_layers = text["hidden_size"], text["num_hidden_layers"]
    num_heads, num_kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    head_dim = text.get("head_dim") or width // num_heads
    kind = text.get("model_type") or config["model_type"]
    # In older families the text model's setting counts, if there is one.
    places = (config, text) if kind.startswith("qwen3_vl") else (text, config)
    is_tied = next((d["tie_word_embeddings"] for d in places if "tie_word_embeddings" in d), False)
    attention = 2 * width * head_dim * (num_heads + num_kv_heads)
    experts = find_experts(text)
    num_dense = num_layers - (experts.num_layers if experts else 0)
    mlp = text["intermediate_size"] if num_dense else 0
    products = num_layers * attention + 3 * width * num_dense * mlp
    routers = 0
    if experts:
        each = 3 * width * experts.width
        products += experts.num_layers * experts.num_experts * each
        routers = experts.num_layers * experts.num_experts * width
    if kind.startswith("qwen3"):  # norms of queries and keys
        others = 2 * head_dim + 2 * width
    else:  # biases of queries, keys and values
        others = head_dim * (num_heads + 2 * num_kv_heads) + 2 * width
    embeddings = text["vocab_size"] * width * (1 if is_tied else 2)
    tower = _TOWERS[config["model_type"]](config["vision_config"], width)
    return ModelShape(
        name=name,
        num_parameters=(
            embeddings + products + routers + num_layers * others + width + tower.num_parameters
        ),
        num_shared_parameters=products,
        num_head_parameters=text["vocab_size"] * width,
        is_tied=is_tied,
        num_layers=num_layers,
        hidden_size=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=mlp,
        vision_width=tower.width,
        vision_mlp_width=tower.mlp_width,
        patch_values=tower.patch_values,
        patches_per_token=tower.patches_per_token,
        tokens_per_side=tower.tokens_per_side,
        token_pixels=tower.token_pixels,
        token_frames=tower.token_frames,
        num_separators=tower.num_separators,
        frame_text_tokens=tower.frame_text_tokens,
        feature_parts=tower.feature_parts,
        experts=experts,
    )


def find_experts(text: Mapping[str, Any]) -> Experts | None:
    """Returns the mixtures of experts of a text model's configuration; None: it has none.

    The number of experts has another name where transformers has saved the configuration.
    """
    count = text.get("num_experts") or text.get("num_local_experts")
    if not count:
        return None
    step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers") or ()
    layers = range(text["num_hidden_layers"])
    num_layers = sum((index + 1) % step == 0 and index not in dense for index in layers)
    chosen, width = text["num_experts_per_tok"], text["moe_intermediate_size"]
    return Experts(num_layers, count, chosen, width) if num_layers else None


@dataclass(frozen=True, slots=True)
class _Tower:
    """The dimensions of a vision tower with its projector; see ModelShape."""

    num_parameters: int
    width: int
    mlp_width: int
    patch_values: int
    patches_per_token: float
    tokens_per_side: int = 0
    token_pixels: int = 0
    token_frames: int = 1
    num_separators: int = 0
    frame_text_tokens: int = 0
    feature_parts: int = 1


def _qwen2_tower(vision: Mapping[str, Any], width: int) -> _Tower:
    vision = {**PUBLIC_TOWERS["qwen2_vl"], **vision}  # AWQ and GPTQ repositories leave them out
    hidden = vision["embed_dim"]
    mlp = int(hidden * vision["mlp_ratio"])
    # Norms with biases, and an MLP of two products with biases.
    block = 4 * hidden + 4 * (hidden * hidden + hidden) + 2 * hidden * mlp + mlp + hidden
    return _patch_tower(vision, hidden, mlp, block, _merger(vision, hidden, width) + hidden)


def _qwen2_5_tower(vision: Mapping[str, Any], width: int) -> _Tower:
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    attention = 4 * hidden * hidden + 4 * hidden
    block = 2 * hidden + attention + 3 * hidden * mlp + 2 * mlp + hidden
    return _patch_tower(vision, hidden, mlp, block, _merger(vision, hidden, width))


def _qwen3_tower(vision: Mapping[str, Any], width: int) -> _Tower:
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    num_added = len(vision["deepstack_visual_indexes"])
    block = 4 * hidden + 4 * (hidden * hidden + hidden) + 2 * hidden * mlp + mlp + hidden
    others = _merger(vision, hidden, width) + hidden  # its norm has a bias
    # The mergers of deepstack normalise merged patches.
    others += num_added * (_merger(vision, hidden, width) - hidden + 2 * merged)
    others += hidden + vision["num_position_embeddings"] * hidden  # bias of the patch embedding
    return replace(
        _patch_tower(vision, hidden, mlp, block, others),
        feature_parts=1 + num_added,
        frame_text_tokens=12,  # < 1 2 3 4 5 . 6 seconds > <|vision_start|> <|vision_end|>
    )


def _merger(vision: Mapping[str, Any], hidden: int, width: int) -> int:
    """Counts a norm without a bias and two products, from merged patches to tokens."""
    merged = hidden * vision["spatial_merge_size"] ** 2
    return int(hidden + merged * merged + merged + merged * width + width)


def _patch_tower(
    vision: Mapping[str, Any], hidden: int, mlp: int, block: int, others: int
) -> _Tower:
    """Describes a tower of the Qwen kind; ``block`` and ``others`` are numbers of parameters."""
    depth, patch, merge = (
        vision["temporal_patch_size"], vision["patch_size"], vision["spatial_merge_size"]
    )  # fmt: skip
    values = 3 * depth * patch**2
    return _Tower(
        num_parameters=int(values * hidden + vision["depth"] * block + others),
        width=hidden,
        mlp_width=mlp,
        patch_values=values,
        patches_per_token=merge**2,
        token_pixels=patch * merge,
        token_frames=depth,
    )


def _siglip_tower(vision: Mapping[str, Any], width: int) -> _Tower:
    """Describes LLaVA-OneVision's vision tower, projector and newline."""
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    num_sides = vision["image_size"] // vision["patch_size"]
    patch = 3 * vision["patch_size"] ** 2 * hidden + hidden
    block = 4 * hidden + 4 * (hidden * hidden + hidden) + 2 * hidden * mlp + mlp + hidden
    projector = hidden * width + width + width * width + width
    tower = patch + num_sides**2 * hidden + vision["num_hidden_layers"] * block + 2 * hidden
    side = math.ceil(num_sides / 2)
    return _Tower(
        num_parameters=int(tower + projector + width),
        width=hidden,
        mlp_width=mlp,
        patch_values=3 * vision["patch_size"] ** 2,
        patches_per_token=(num_sides / side) ** 2,
        tokens_per_side=side,
        num_separators=1,
    )


def _internvl_tower(vision: Mapping[str, Any], width: int) -> _Tower:
    """Describes InternVL's vision tower and projector; four patches become one token."""
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    patch, side = (
        value if isinstance(value, int) else value[0]
        for value in (vision["patch_size"], vision["image_size"])
    )
    num_sides, merged = side // patch, 4 * hidden
    norm = hidden if vision.get("norm_type") == "rms_norm" else 2 * hidden
    attention = 4 * hidden * hidden + hidden
    attention += 3 * hidden if vision.get("attention_bias") else 0
    attention += 2 * hidden if vision.get("use_qk_norm") else 0
    # Each half of a layer also has a scale.
    block = 2 * norm + 2 * hidden + attention + 2 * hidden * mlp + mlp + hidden
    embeddings = 3 * patch**2 * hidden + hidden + hidden + (num_sides**2 + 1) * hidden
    last_norm = 0 if vision.get("use_mean_pooling", True) else 2 * hidden
    projector = 2 * merged + merged * width + width + width * width + width
    return _Tower(
        num_parameters=int(
            embeddings + vision["num_hidden_layers"] * block + last_norm + projector
        ),
        width=hidden,
        mlp_width=mlp,
        patch_values=3 * patch**2,
        patches_per_token=4,
        tokens_per_side=num_sides // 2,
        frame_text_tokens=10,  # </img> \n Frame 9 9 9 9 : space <img>
    )


_TOWERS: Mapping[str, Callable[[Mapping[str, Any], int], _Tower]] = MappingProxyType(
    {
        "internvl": _internvl_tower,
        "llava_onevision": _siglip_tower,
        "qwen2_5_vl": _qwen2_5_tower,
        "qwen2_vl": _qwen2_tower,
        "qwen3_vl": _qwen3_tower,
        "qwen3_vl_moe": _qwen3_tower,
    }
)
"""By ``model_type``."""
