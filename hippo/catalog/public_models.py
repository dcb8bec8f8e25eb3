"""What is known of the model families without their files: the shapes of their vision towers, and
the configurations of public models. Standard library only."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

_QWEN3_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
)
PUBLIC_TOWERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "internvl": {  # InternViT with 300M parameters
            "attention_bias": True,
            "hidden_size": 1024,
            "image_size": [448, 448],
            "intermediate_size": 4096,
            "norm_type": "layer_norm",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": [14, 14],
            "use_qk_norm": False,
        },
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
        "qwen3_5": _QWEN3_VISION,
        "qwen3_vl": {"deepstack_visual_indexes": (8, 16, 24), **_QWEN3_VISION},
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


_SMALL_QWEN3_5_VISION: Mapping[str, Any] = MappingProxyType(
    {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
)
_SMALLEST_QWEN3_5_VISION: Mapping[str, Any] = MappingProxyType(
    {"depth": 12, "hidden_size": 768, "intermediate_size": 3072}
)


def _delta(num_heads: int, **more: Any) -> dict[str, Any]:
    """Returns what a text model of Qwen3.5 adds; every fourth layer attends."""
    return {
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": 128,
        **more,
    }


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
        **({"head_dim": 128} if family.startswith(("qwen3_vl", "internvl")) else {}),
        **({"model_type": "qwen3"} if family == "internvl" else {}),
        **more.get("text", {}),
    }
    vision = {**PUBLIC_TOWERS[family.removesuffix("_moe")], **more.get("vision", {})}
    return MappingProxyType({"model_type": family, "text_config": text, "vision_config": vision})


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

_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
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
        "Qwen/Qwen3.5-0.8B": _public(
            *("qwen3_5", 1024, 24, (8, 2), 3584, 248320),
            is_tied=True,
            text=_delta(16),
            vision=_SMALLEST_QWEN3_5_VISION,
        ),
        "Qwen/Qwen3.5-2B": _public(
            *("qwen3_5", 2048, 24, (8, 2), 6144, 248320),
            is_tied=True,
            text=_delta(16),
            vision=_SMALL_QWEN3_5_VISION,
        ),
        "Qwen/Qwen3.5-4B": _public(
            *("qwen3_5", 2560, 32, (16, 4), 9216, 248320),
            is_tied=True,
            text=_delta(32),
            vision=_SMALL_QWEN3_5_VISION,
        ),
        "Qwen/Qwen3.5-9B": _public("qwen3_5", 4096, 32, (16, 4), 12288, 248320, text=_delta(32)),
        "Qwen/Qwen3.5-27B": _public("qwen3_5", 5120, 64, (24, 4), 17408, 248320, text=_delta(48)),
        "Qwen/Qwen3.6-27B": _public("qwen3_5", 5120, 64, (24, 4), 17408, 248320, text=_delta(48)),
        "Qwen/Qwen3.5-35B-A3B": _public(
            *("qwen3_5_moe", 2048, 40, (16, 2), 0, 248320),
            text=_delta(
                32,
                moe_intermediate_size=512,
                num_experts=256,
                num_experts_per_tok=8,
                shared_expert_intermediate_size=512,
            ),
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
        "OpenGVLab/InternVL3_5-1B-HF": _public("internvl", 1024, 28, (16, 8), 3072, 151936),
        "OpenGVLab/InternVL3_5-2B-HF": _public("internvl", 2048, 28, (16, 8), 6144, 151936),
        "OpenGVLab/InternVL3_5-4B-HF": _public("internvl", 2560, 36, (32, 8), 9728, 151936),
        "OpenGVLab/InternVL3_5-8B-HF": _public("internvl", 4096, 36, (32, 8), 12288, 151936),
        "OpenGVLab/InternVL3_5-14B-HF": _public("internvl", 5120, 40, (40, 8), 17408, 151936),
        "OpenGVLab/InternVL3_5-38B-HF": _public(
            "internvl", 5120, 64, (64, 8), 25600, 151936, vision=_INTERNVIT_6B
        ),
    }
)
# Qwen3-VL's Thinking checkpoints have the same shapes.
_THINKING = {name.replace("Instruct", "Thinking"): name for name in _CONFIGS if "Qwen3-VL" in name}
PUBLIC_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {**_CONFIGS, **{name: _CONFIGS[same] for name, same in _THINKING.items()}}
)
"""By repository name: the part of its config.json (https://huggingface.co/NAME) that sets sizes."""


@dataclass(frozen=True, slots=True)
class Tower:
    """The dimensions of a vision tower with its projector, and of a video's tokens."""

    num_parameters: int  # in all products; norms and biases, a thousandth, are left out
    width: int
    patch_values: int  # numbers in a patch's pixels
    patches_per_token: float
    tokens_per_side: int = 0  # in the grid of a frame of fixed size; 0: frames have any size
    token_pixels: int = 0  # side of the square that one token covers; 0: frames have a fixed size
    token_frames: int = 1  # frames that one token covers
    num_separators: int = 0  # visual tokens at the end of a video, beside its grid
    frame_text_tokens: int = 0  # most tokens of the text of a frame
    feature_parts: int = 1  # hidden-sized parts of a visual row: more than 1 with deepstack


def _qwen2_tower(vision: Mapping[str, Any], width: int) -> Tower:
    vision = {**PUBLIC_TOWERS["qwen2_vl"], **vision}  # AWQ and GPTQ repositories leave them out
    hidden = vision["embed_dim"]
    return _patch_tower(vision, width, hidden, mlp=2 * vision["mlp_ratio"] * hidden)


def _qwen2_5_tower(vision: Mapping[str, Any], width: int) -> Tower:
    return _patch_tower(vision, width, vision["hidden_size"], mlp=3 * vision["intermediate_size"])


def _qwen3_tower(vision: Mapping[str, Any], width: int) -> Tower:
    hidden, num_added = vision["hidden_size"], len(vision["deepstack_visual_indexes"])
    tower = _patch_tower(vision, width, hidden, 2 * vision["intermediate_size"], 1 + num_added)
    return replace(
        tower,
        num_parameters=tower.num_parameters + vision["num_position_embeddings"] * hidden,
        feature_parts=1 + num_added,
        frame_text_tokens=12,  # < 1 2 3 4 5 . 6 seconds > <|vision_start|> <|vision_end|>
    )


def _qwen3_5_tower(vision: Mapping[str, Any], width: int) -> Tower:
    return _qwen3_tower({**vision, "deepstack_visual_indexes": ()}, width)


def _patch_tower(
    vision: Mapping[str, Any], width: int, hidden: int, mlp: float, num_mergers: int = 1
) -> Tower:
    """Describes a tower of the Qwen kind; ``mlp`` is the width of all products of an MLP, and a
    merger has two products, from merged patches to a token."""
    depth, patch, merge = (
        vision["temporal_patch_size"], vision["patch_size"], vision["spatial_merge_size"]
    )  # fmt: skip
    values, merged = 3 * depth * patch**2, hidden * merge**2
    blocks = vision["depth"] * hidden * (4 * hidden + mlp)
    return Tower(
        num_parameters=int(values * hidden + blocks + num_mergers * merged * (merged + width)),
        width=hidden,
        patch_values=values,
        patches_per_token=merge**2,
        token_pixels=patch * merge,
        token_frames=depth,
    )


def _siglip_tower(vision: Mapping[str, Any], width: int) -> Tower:
    """Describes LLaVA-OneVision's vision tower, projector and newline."""
    num_sides = vision["image_size"] // vision["patch_size"]
    side = math.ceil(num_sides / 2)
    tower = _picture_tower(vision, width, num_sides, vision["patch_size"], 1)
    per_token = (num_sides / side) ** 2
    return replace(tower, patches_per_token=per_token, tokens_per_side=side, num_separators=1)


def _internvl_tower(vision: Mapping[str, Any], width: int) -> Tower:
    """Describes InternVL's vision tower and projector; four patches become one token."""
    patch, image = (
        value if isinstance(value, int) else value[0]
        for value in (vision["patch_size"], vision["image_size"])
    )
    tower = _picture_tower(vision, width, image // patch, patch, 4)
    return replace(tower, frame_text_tokens=10)  # </img> \n Frame 9 9 9 9 : space <img>


def _picture_tower(
    vision: Mapping[str, Any], width: int, num_sides: int, patch: int, num_merged: int
) -> Tower:
    """Describes a tower of pictures of one size with two products as its projector; a token is made
    of ``num_merged`` patches."""
    hidden, values = vision["hidden_size"], 3 * patch**2
    blocks = vision["num_hidden_layers"] * 2 * hidden * (2 * hidden + vision["intermediate_size"])
    projector = num_merged * hidden * width + width**2
    return Tower(
        num_parameters=(values + num_sides**2) * hidden + blocks + projector,
        width=hidden,
        patch_values=values,
        patches_per_token=num_merged,
        tokens_per_side=num_sides // 2,
    )


TOWERS: Mapping[str, Callable[[Mapping[str, Any], int], Tower]] = MappingProxyType(
    {
        "internvl": _internvl_tower,
        "llava_onevision": _siglip_tower,
        "qwen2_5_vl": _qwen2_5_tower,
        "qwen2_vl": _qwen2_tower,
        "qwen3_5": _qwen3_5_tower,
        "qwen3_5_moe": _qwen3_5_tower,
        "qwen3_vl": _qwen3_tower,
        "qwen3_vl_moe": _qwen3_tower,
    }
)
"""By ``model_type``: reads a vision configuration, with the width of the language model. Raises
KeyError for what it lacks."""
