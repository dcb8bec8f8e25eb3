"""Small random InternVL checkpoints."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hippo.models.loading._torchvision import ensure_torchvision
from tests.support.models.checkpoints import byte_tokenizer, save_model, seeded_model, text_config

NAMED_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *NAMED_TOKENS.values())

# That of the hub's repositories.
CHAT_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for content in message['content'] %}{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\\n' }}\
{% elif content['type'] == 'video' %}{{ '<video>\\n' }}\
{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}\
{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

IMAGE_SIZE, PATCH_SIZE = 28, 7  # 4 x 4 patches, 2 x 2 tokens


def write_internvl_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
    noise: float = 0.0,
    language: str = "qwen3",
) -> Path:
    """Saves a seeded random model with its processor to ``folder`` and returns it.

    The arguments are those of tests.support.models.checkpoints.write_checkpoint, and the language
    model: of "qwen3" with heads larger than hidden_size / num_heads, or of "qwen2" as in InternVL3.
    The processor cuts an image into at most 4 tiles.
    """
    ensure_torchvision()
    transformers: Any = importlib.import_module("transformers")
    processor = internvl_processor()
    own = {"head_dim": 32} if language == "qwen3" else {}
    config = transformers.InternVLConfig(
        text_config=text_config(
            processor.tokenizer, model_type=language, tie_word_embeddings=False, **own
        ),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "attention_bias": True,
            "image_size": [IMAGE_SIZE, IMAGE_SIZE],
            "patch_size": [PATCH_SIZE, PATCH_SIZE],
            "initializer_range": 0.12,
            "layer_scale_init_value": 0.5,
        },
        image_token_id=processor.image_token_id,
        image_seq_length=processor.image_seq_length,
        tie_word_embeddings=False,
    )
    model = seeded_model(
        transformers.InternVLForConditionalGeneration, config, seed, noise, vocab_size
    )
    return save_model(model, processor, folder)


def internvl_processor(
    *, image_size: int = IMAGE_SIZE, patch_size: int = PATCH_SIZE, max_patches: int = 4
) -> Any:
    """A processor with the hub's settings but for the sizes; 448, 14 and 12 are the hub's."""
    ensure_torchvision()
    transformers: Any = importlib.import_module("transformers")
    settings: dict[str, Any] = {
        "size": {"height": image_size, "width": image_size},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    tokenizer = byte_tokenizer(
        transformers, ("t h", "th e", "i n", "a n"), SPECIAL_TOKENS, named_tokens=NAMED_TOKENS
    )
    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(max_patches=max_patches, **settings),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(**settings),
        image_seq_length=(image_size // patch_size // 2) ** 2,
        chat_template=CHAT_TEMPLATE,
    )


HUB_PREFIXES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.": "",
}
"""The hub's names of weights: transformers 4 saved the language model as a model of its own."""

_HUB_PICTURES: dict[str, Any] = {
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "processor_class": "InternVLProcessor",
    "size": {"height": 448, "width": 448},
}
HUB_PROCESSORS: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        **_HUB_PICTURES,
        "crop_to_patches": False,
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "max_patches": 12,
        "min_patches": 1,
    },
    "video_preprocessor_config.json": {
        **_HUB_PICTURES,
        "video_processor_type": "InternVLVideoProcessor",
    },
    "processor_config.json": {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
}


def hub_config(
    ids: dict[str, int], heads: tuple[int, int], num_padding_ids: int, *, is_large: bool
) -> dict[str, Any]:
    """A config.json of the hub's, but small; ``heads`` are of queries and of keys, and
    ``is_large`` gives it the form of the 6B tower. Nothing at the top says that embeddings are
    not tied."""
    vision: dict[str, Any] = {
        "attention_bias": not is_large,
        "hidden_size": 32,
        "image_size": [448, 448],
        "initializer_range": 0.12,  # the hub's 1e-10 makes small towers blind
        "intermediate_size": 64,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "rms_norm" if is_large else "layer_norm",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "patch_size": [14, 14],
        "torch_dtype": "bfloat16",
        "use_qk_norm": is_large,
    }
    text: dict[str, Any] = {
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": 32,
        "hidden_size": 16 * heads[0],
        "initializer_range": 0.12,
        "intermediate_size": 128,
        "layer_types": ["full_attention"] * 2,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": heads[0],
        "num_hidden_layers": 2,
        "num_key_value_heads": heads[1],
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": len(ids) + num_padding_ids,
    }
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "model_type": "internvl",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0",
        "vision_config": vision,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }
