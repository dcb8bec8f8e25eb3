"""Configurations of public models, so that their sizes are known without their files."""

from __future__ import annotations

from collections.abc import Mapping
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
