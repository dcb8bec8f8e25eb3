"""Configurations of the Qwen-VL repositories in the form of the hub's files, but small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hippo.catalog.public_models import PUBLIC_TOWERS

if TYPE_CHECKING:
    from tests.support.models.hub_forms import HubForm

HEAD_DIM = 16
NUM_LAYERS = 2

_ARCHITECTURES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}


def text_settings(form: HubForm, ids: dict[str, int]) -> dict[str, Any]:
    """What the text models of all families have."""
    return {
        "hidden_size": form.width or form.num_heads * HEAD_DIM,
        "intermediate_size": 128,
        "initializer_range": 0.12,  # the hub's 0.02 makes small models say one thing
        "num_attention_heads": form.num_heads,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": form.num_kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "vocab_size": len(ids) + form.num_padding_ids,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }


def qwen_config(family: str, form: HubForm, ids: dict[str, int]) -> dict[str, Any]:
    """Qwen2-VL's and Qwen2.5-VL's are flat: the text model's settings stand beside the others."""
    common = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "tie_word_embeddings": form.is_tied,
    }
    if family.startswith("qwen3_vl"):
        return common | _nested(family, form, ids)
    rope: dict[str, Any] = {"mrope_section": [2, 3, 3], "type": form.rope_scaling_type}
    vision = {
        **PUBLIC_TOWERS[family],
        "depth": 2,
        "in_chans": 3,
        "num_heads": 2,
    }
    width = form.num_heads * HEAD_DIM
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": width}
    else:
        vision |= {
            "fullatt_block_indexes": [1],
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": width,
            "tokens_per_second": 2,
            "window_size": 112,
        }
    if form.rope_scaling_type == "default":  # of the later repositories
        rope["rope_type"] = "default"
        vision["model_type"] = family
    return {
        **common,
        "vision_token_id": ids["<|vision_pad|>"],
        **text_settings(form, ids),
        "max_position_embeddings": 32768 if family == "qwen2_vl" else 128000,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "rope_scaling": rope,
        "vision_config": vision,
    }


_EXPERTS = {
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}


def _nested(family: str, form: HubForm, ids: dict[str, int]) -> dict[str, Any]:
    text = text_settings(form, ids) | {
        "dtype": "bfloat16",
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 262144,
        "model_type": f"{family}_text",
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
    }
    if family == "qwen3_vl_moe":
        text |= _EXPERTS
    if form.is_tied:
        text["tie_word_embeddings"] = True
    vision = {
        **PUBLIC_TOWERS["qwen3_vl"],
        "deepstack_visual_indexes": [0, 1],
        "depth": 3,
        "hidden_size": 32,
        "initializer_range": 0.12,
        "intermediate_size": 64,
        "model_type": family,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
    }
    return {"text_config": text, "vision_config": vision}


def _preprocessor(name: str) -> dict[str, Any]:
    return {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": name,
    }


_QWEN3_PREPROCESSOR: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}

_QWEN3_PREPROCESSORS: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        **_QWEN3_PREPROCESSOR,
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    "video_preprocessor_config.json": {
        **_QWEN3_PREPROCESSOR,
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
}

QWEN_PREPROCESSORS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_5_vl": {"preprocessor_config.json": _preprocessor("Qwen2_5_VLProcessor")},
    "qwen2_vl": {"preprocessor_config.json": _preprocessor("Qwen2VLProcessor")},
    "qwen3_vl": _QWEN3_PREPROCESSORS,
    "qwen3_vl_moe": _QWEN3_PREPROCESSORS,
}
"""Files by family and name."""
