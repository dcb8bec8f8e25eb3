"""The shapes of the models, built as transformers' Qwen2.5-VL or Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from hippo.models.loading._torchvision import ensure_torchvision

Family = Literal["qwen2_5_vl", "qwen3_vl"]
HIDDEN = 320


@dataclass(frozen=True, slots=True)
class DemoShape:
    """The family, and the sizes in which the models of a pair differ."""

    num_layers: int
    vocab_size: int
    hidden_size: int = HIDDEN
    intermediate_size: int = 768
    family: Family = "qwen2_5_vl"


TARGET = DemoShape(num_layers=20, vocab_size=640)
DRAFT = DemoShape(num_layers=2, vocab_size=576)


_TOWER_QWEN2_5: Mapping[str, Any] = {
    "hidden_act": "silu",
    "intermediate_size": 384,
    "tokens_per_second": 2,
    "window_size": 112,
    "fullatt_block_indexes": [0, 1],
}
_TOWER_QWEN3: Mapping[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 512,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of the tokenizer's special tokens."""

    end_of_text: int
    im_end: int
    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int


def build(shape: DemoShape, ids: SpecialIds) -> Any:
    """Returns a float32 model of the given shape, with weights from torch's global generator."""
    ensure_torchvision()
    hf: Any = import_module("transformers")
    is_qwen3 = shape.family == "qwen3_vl"
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 128,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": shape.hidden_size,
        **(_TOWER_QWEN3 if is_qwen3 else _TOWER_QWEN2_5),
    }
    text: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.hidden_size // 64,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [12, 10, 10] if is_qwen3 else [8, 12, 12],
        },
        **({"head_dim": 64} if is_qwen3 else {}),
        "bos_token_id": ids.end_of_text,
        "eos_token_id": ids.im_end,
        "pad_token_id": ids.end_of_text,
        "tie_word_embeddings": True,
    }
    name = "Qwen3VL" if is_qwen3 else "Qwen2_5_VL"
    config = getattr(hf, f"{name}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=ids.image_pad,
        video_token_id=ids.video_pad,
        vision_start_token_id=ids.vision_start,
        vision_end_token_id=ids.vision_end,
        tie_word_embeddings=True,
    )
    return getattr(hf, f"{name}ForConditionalGeneration")(config)
