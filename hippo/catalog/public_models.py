"""What is known of the model families without their files: the shapes of their vision towers, and
the configurations of public models. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

PUBLIC_TOWERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llava_onevision": {
            "hidden_size": 1152,
            "image_size": 384,
            "intermediate_size": 4304,
            "num_hidden_layers": 26,
            "patch_size": 14,
        },
        "qwen2_5_vl": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "qwen2_vl": {
            "depth": 32,
            "embed_dim": 1280,
            "mlp_ratio": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "qwen3_vl": {
            "deepstack_visual_indexes": (8, 16, 24),
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_position_embeddings": 2304,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
)
"""The part of the vision configuration that sets sizes, by family; some models have others."""

_SMALL_QWEN3_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "deepstack_visual_indexes": (5, 11, 17),
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
    }
)


def _public(
    family: str, width: int, layers: int, heads: tuple[int, int], mlp: int, ids: int, **more: Any
) -> Mapping[str, Any]:
    text = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": mlp,
        "vocab_size": ids,
        "tie_word_embeddings": more.get("is_tied", False),
        **({"head_dim": 128} if family.startswith("qwen3_vl") else {}),
        **more.get("text", {}),
    }
    vision = {**PUBLIC_TOWERS[family.removesuffix("_moe")], **more.get("vision", {})}
    return MappingProxyType({"model_type": family, "text_config": text, "vision_config": vision})


def _internvl(
    width: int, layers: int, num_heads: int, mlp: int, vision: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """InternVL3.5: layers of Qwen3 with untied embeddings, and a tower of 300M parameters."""
    text = {
        "model_type": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": mlp,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    tower = {
        "attention_bias": True,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "intermediate_size": 4096,
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "use_qk_norm": False,
    }
    vision = {**tower, **(vision or {})}
    return MappingProxyType(
        {"model_type": "internvl", "text_config": text, "vision_config": vision}
    )


_INTERNVIT_6B: Mapping[str, Any] = MappingProxyType(
    {
        "attention_bias": False,
        "hidden_size": 3200,
        "intermediate_size": 12800,
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "use_qk_norm": True,
    }
)

PUBLIC_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen/Qwen2-VL-2B-Instruct": _public(
            "qwen2_vl", 1536, 28, (12, 2), 8960, 151936, is_tied=True
        ),
        "Qwen/Qwen2-VL-7B-Instruct": _public("qwen2_vl", 3584, 28, (28, 4), 18944, 152064),
        "Qwen/Qwen2-VL-72B-Instruct": _public("qwen2_vl", 8192, 80, (64, 8), 29568, 152064),
        "Qwen/Qwen2.5-VL-3B-Instruct": _public(
            "qwen2_5_vl", 2048, 36, (16, 2), 11008, 151936, is_tied=True
        ),
        "Qwen/Qwen2.5-VL-7B-Instruct": _public("qwen2_5_vl", 3584, 28, (28, 4), 18944, 152064),
        "Qwen/Qwen2.5-VL-32B-Instruct": _public(
            "qwen2_5_vl", 5120, 64, (40, 8), 27648, 152064, vision={"intermediate_size": 3456}
        ),
        "Qwen/Qwen2.5-VL-72B-Instruct": _public(
            "qwen2_5_vl", 8192, 80, (64, 8), 29568, 152064, vision={"intermediate_size": 3456}
        ),
        "Qwen/Qwen3-VL-2B-Instruct": _public(
            *("qwen3_vl", 2048, 28, (16, 8), 6144, 151936),
            is_tied=True,
            vision=_SMALL_QWEN3_VISION,
        ),
        "Qwen/Qwen3-VL-4B-Instruct": _public(
            *("qwen3_vl", 2560, 36, (32, 8), 9728, 151936),
            is_tied=True,
            vision=_SMALL_QWEN3_VISION,
        ),
        "Qwen/Qwen3-VL-8B-Instruct": _public("qwen3_vl", 4096, 36, (32, 8), 12288, 151936),
        "Qwen/Qwen3-VL-32B-Instruct": _public("qwen3_vl", 5120, 64, (64, 8), 25600, 151936),
        "Qwen/Qwen3-VL-30B-A3B-Instruct": _public(
            *("qwen3_vl_moe", 2048, 48, (32, 4), 6144, 151936),
            text={
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
        ),
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": _public(
            "llava_onevision", 896, 24, (14, 2), 4864, 152000, is_tied=True
        ),
        "llava-hf/llava-onevision-qwen2-7b-ov-hf": _public(
            "llava_onevision", 3584, 28, (28, 4), 18944, 152128
        ),
        "llava-hf/llava-onevision-qwen2-72b-ov-hf": _public(
            "llava_onevision", 8192, 80, (64, 8), 29568, 152128
        ),
        "OpenGVLab/InternVL3_5-1B-HF": _internvl(1024, 28, 16, 3072),
        "OpenGVLab/InternVL3_5-2B-HF": _internvl(2048, 28, 16, 6144),
        "OpenGVLab/InternVL3_5-4B-HF": _internvl(2560, 36, 32, 9728),
        "OpenGVLab/InternVL3_5-8B-HF": _internvl(4096, 36, 32, 12288),
        "OpenGVLab/InternVL3_5-14B-HF": _internvl(5120, 40, 40, 17408),
        "OpenGVLab/InternVL3_5-38B-HF": _internvl(5120, 64, 64, 25600, _INTERNVIT_6B),
    }
)
"""By repository name: the part of its config.json (https://huggingface.co/NAME) that sets sizes."""


@dataclass(frozen=True, slots=True)
class Tower:
    """The dimensions of a vision tower with its projector, and of a video's tokens."""

    num_parameters: int
    width: int
    mlp_width: int
    patch_values: int  # numbers in a patch's pixels
    patches_per_token: float
    tokens_per_side: int = 0  # of the grid of a frame of fixed size; 0: frames have any size
    token_pixels: int = 0  # side of the square that one token covers; 0: frames have a fixed size
    token_frames: int = 1  # frames that one token covers
    num_separators: int = 0  # visual tokens at the end of a video, beside its grid
    frame_text_tokens: int = 0  # most tokens of the text of a frame
    feature_parts: int = 1  # hidden-sized parts of a visual row: more than 1 with deepstack


def _qwen2_tower(vision: Mapping[str, Any], width: int) -> Tower:
    vision = {**PUBLIC_TOWERS["qwen2_vl"], **vision}  # AWQ and GPTQ repositories leave them out
    hidden = vision["embed_dim"]
    mlp = int(hidden * vision["mlp_ratio"])
    # Norms with biases, and an MLP of two products with biases.
    block = 4 * hidden + 4 * (hidden * hidden + hidden) + 2 * hidden * mlp + mlp + hidden
    return _patch_tower(vision, hidden, mlp, block, _merger(vision, hidden, width) + hidden)


def _qwen2_5_tower(vision: Mapping[str, Any], width: int) -> Tower:
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    attention = 4 * hidden * hidden + 4 * hidden
    block = 2 * hidden + attention + 3 * hidden * mlp + 2 * mlp + hidden
    return _patch_tower(vision, hidden, mlp, block, _merger(vision, hidden, width))


def _qwen3_tower(vision: Mapping[str, Any], width: int) -> Tower:
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
) -> Tower:
    """Describes a tower of the Qwen kind; ``block`` and ``others`` are numbers of parameters."""
    depth, patch, merge = (
        vision["temporal_patch_size"], vision["patch_size"], vision["spatial_merge_size"]
    )  # fmt: skip
    values = 3 * depth * patch**2
    return Tower(
        num_parameters=int(values * hidden + vision["depth"] * block + others),
        width=hidden,
        mlp_width=mlp,
        patch_values=values,
        patches_per_token=merge**2,
        token_pixels=patch * merge,
        token_frames=depth,
    )


def _siglip_tower(vision: Mapping[str, Any], width: int) -> Tower:
    """Describes LLaVA-OneVision's vision tower, projector and newline."""
    hidden, mlp = vision["hidden_size"], vision["intermediate_size"]
    num_sides = vision["image_size"] // vision["patch_size"]
    patch = 3 * vision["patch_size"] ** 2 * hidden + hidden
    block = 4 * hidden + 4 * (hidden * hidden + hidden) + 2 * hidden * mlp + mlp + hidden
    projector = hidden * width + width + width * width + width
    tower = patch + num_sides**2 * hidden + vision["num_hidden_layers"] * block + 2 * hidden
    side = math.ceil(num_sides / 2)
    return Tower(
        num_parameters=int(tower + projector + width),
        width=hidden,
        mlp_width=mlp,
        patch_values=3 * vision["patch_size"] ** 2,
        patches_per_token=(num_sides / side) ** 2,
        tokens_per_side=side,
        num_separators=1,
    )


def _internvl_tower(vision: Mapping[str, Any], width: int) -> Tower:
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
    return Tower(
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


TOWERS: Mapping[str, Callable[[Mapping[str, Any], int], Tower]] = MappingProxyType(
    {
        "internvl": _internvl_tower,
        "llava_onevision": _siglip_tower,
        "qwen2_5_vl": _qwen2_5_tower,
        "qwen2_vl": _qwen2_tower,
        "qwen3_vl": _qwen3_tower,
        "qwen3_vl_moe": _qwen3_tower,
    }
)
"""By ``model_type``: reads a vision configuration, with the width of the language model. Raises
KeyError for what it lacks."""
