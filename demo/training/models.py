"""The shapes of the models, built as transformers' Qwen2.5-VL."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hippo.models.loading._torchvision import ensure_torchvision

HIDDEN = 320


@dataclass(frozen=True, slots=True)
class DemoShape:
    """The sizes in which the models of a pair differ."""

    num_layers: int
    vocab_size: int
    hidden_size: int = HIDDEN
    intermediate_size: int = 768


TARGET = DemoShape(num_layers=20, vocab_size=640)
DRAFT = DemoShape(num_layers=2, vocab_size=576)


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
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 128,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": shape.hidden_size,
        "hidden_act": "silu",
        "intermediate_size": 384,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [0, 1],
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
            "mrope_section": [8, 12, 12],
        },
        "bos_token_id": ids.end_of_text,
        "eos_token_id": ids.im_end,
        "pad_token_id": ids.end_of_text,
        "tie_word_embeddings": True,
    }
    config = hf.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids.image_pad,
        video_token_id=ids.video_pad,
        vision_start_token_id=ids.vision_start,
        vision_end_token_id=ids.vision_end,
        tie_word_embeddings=True,
    )
    return hf.Qwen2_5_VLForConditionalGeneration(config)
