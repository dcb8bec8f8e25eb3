"""Configurations of the hub's repositories in the form of their files, but small."""

from typing import TYPE_CHECKING, Any

from hippo.catalog.public_models import PUBLIC_TOWERS
from tests.support.models.checkpoints import TOWER
from tests.support.models.llava import pinpoints

if TYPE_CHECKING:
    from tests.support.models.hub_forms import HubForm

_ARCHITECTURES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
}


def hub_config(family: str, form: "HubForm", ids: dict[str, int]) -> dict[str, Any]:
    """The config.json of a repository; ``ids`` are those of tokens."""
    make = {"internvl": _internvl, "llava_onevision": _llava}.get(family, _qwen)
    common = {"architectures": [_ARCHITECTURES[family]], "model_type": family}
    return common | make(family, form, ids)


def _text(form: "HubForm", ids: dict[str, int]) -> dict[str, Any]:
    """What the text models of all families have."""
    return {
        "hidden_size": form.width or form.num_heads * 16,
        "intermediate_size": 128,
        "initializer_range": 0.12,  # the hub's 0.02 makes small models say one thing
        "num_attention_heads": form.num_heads,
        "num_hidden_layers": 2,
        "num_key_value_heads": form.num_kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "vocab_size": len(ids) + form.num_padding_ids,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }


def _qwen(family: str, form: "HubForm", ids: dict[str, int]) -> dict[str, Any]:
    """Qwen2-VL's and Qwen2.5-VL's are flat: the text model's settings stand beside the others."""
    common = {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "tie_word_embeddings": form.is_tied,
    }
    if family.startswith("qwen3_vl"):
        return common | _nested(family, form, ids)
    if family.startswith("qwen3_5"):
        return common | _hybrid(family, form, ids)
    text = _text(form, ids)
    rope: dict[str, Any] = {"mrope_section": [2, 3, 3], "type": form.rope_scaling_type}
    vision = {**PUBLIC_TOWERS[family], "depth": 2, "in_chans": 3, "num_heads": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": text["hidden_size"]}
    else:
        vision |= {
            "fullatt_block_indexes": [1],
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": text["hidden_size"],
            "tokens_per_second": 2,
            "window_size": 112,
        }
    if form.rope_scaling_type == "default":  # of the later repositories
        rope["rope_type"] = "default"
        vision["model_type"] = family
    return {
        **common,
        **text,
        "vision_token_id": ids["<|vision_pad|>"],
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


def _nested(family: str, form: "HubForm", ids: dict[str, int]) -> dict[str, Any]:
    text = _text(form, ids) | {
        "dtype": "bfloat16",
        "head_dim": 16,
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


def _hybrid(family: str, form: "HubForm", ids: dict[str, int]) -> dict[str, Any]:
    """The rotary settings are in the form of transformers 5, and each layer's kind is listed."""
    text = _text(form, ids) | {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 32,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": form.num_value_heads,
        "linear_value_head_dim": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": f"{family}_text",
        "mtp_num_hidden_layers": 1,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": form.is_tied,
    }
    del text["rope_theta"]
    if family == "qwen3_5_moe":
        text |= _EXPERTS | {"shared_expert_intermediate_size": 24}
        del text["intermediate_size"]
    vision = {
        **PUBLIC_TOWERS["qwen3_5"],
        "deepstack_visual_indexes": [],
        "depth": 3,
        "hidden_size": 32,
        "initializer_range": 0.12,
        "intermediate_size": 64,
        "model_type": family,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
    }
    return {"text_config": text, "vision_config": vision}


def _llava(_family: str, form: "HubForm", ids: dict[str, int]) -> dict[str, Any]:
    """Nested; whether embeddings are tied stands with the text model and not at the top."""
    text = _text(form, ids) | {
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    }
    if form.is_tied:
        text["tie_word_embeddings"] = True
    return {
        "image_grid_pinpoints": pinpoints(384),
        "image_token_index": ids["<image>"],
        "video_token_index": ids["<video>"],
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {
            **TOWER,
            "image_size": 384,
            "model_type": "siglip_vision_model",
            "patch_size": 14,
            "vision_use_head": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def _internvl(_family: str, form: "HubForm", ids: dict[str, int]) -> dict[str, Any]:
    """Nested. Nothing at the top says that embeddings are not tied."""
    text = _text(form, ids) | {
        "head_dim": 32,
        "layer_types": ["full_attention"] * 2,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }
    vision = {
        **TOWER,
        "attention_bias": not form.has_large_tower,
        "image_size": [448, 448],
        "initializer_range": 0.12,  # the hub's 1e-10 makes small towers blind
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "rms_norm" if form.has_large_tower else "layer_norm",
        "patch_size": [14, 14],
        "torch_dtype": "bfloat16",
        "use_qk_norm": form.has_large_tower,
    }
    return {
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "text_config": text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0",
        "vision_config": vision,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def _qwen2_files(processor: str) -> dict[str, dict[str, Any]]:
    settings = {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor,
    }
    return {"preprocessor_config.json": settings}


def _both_files(
    common: dict[str, Any], images: dict[str, Any], videos: dict[str, Any], **processor: Any
) -> dict[str, dict[str, Any]]:
    files = {
        "preprocessor_config.json": common | images,
        "video_preprocessor_config.json": common | videos,
    }
    if processor:
        own = {"processor_class": common["processor_class"]}
        files["processor_config.json"] = processor | own
    return files


_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_QWEN3_FILES = _both_files(
    {
        **_HALVES,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "processor_class": "Qwen3VLProcessor",
    },
    {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    {
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
)

# By family and name.
PREPROCESSORS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_5_vl": _qwen2_files("Qwen2_5_VLProcessor"),
    "qwen2_vl": _qwen2_files("Qwen2VLProcessor"),
    "qwen3_5": _QWEN3_FILES,
    "qwen3_5_moe": _QWEN3_FILES,
    "qwen3_vl": _QWEN3_FILES,
    "qwen3_vl_moe": _QWEN3_FILES,
    "llava_onevision": _both_files(
        {
            **_HALVES,
            "processor_class": "LlavaOnevisionProcessor",
            "size": {"height": 384, "width": 384},
        },
        {
            "image_grid_pinpoints": pinpoints(384),
            "image_processor_type": "LlavaOnevisionImageProcessor",
        },
        {"video_processor_type": "LlavaOnevisionVideoProcessor"},
        image_token="<image>",
        num_image_tokens=729,
        video_token="<video>",
        vision_feature_select_strategy="full",
    ),
    "internvl": _both_files(
        {
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "processor_class": "InternVLProcessor",
            "size": {"height": 448, "width": 448},
        },
        {
            "crop_to_patches": False,
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "max_patches": 12,
            "min_patches": 1,
        },
        {"video_processor_type": "InternVLVideoProcessor"},
        image_seq_length=256,
    ),
}
