"""Small random LLaVA-OneVision checkpoints and the reference they are held against."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hippo.models.loading._torchvision import ensure_torchvision
from tests.support.models.checkpoints import byte_tokenizer, save_model, seeded_model, text_config

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")

# The form of the hub's: in a turn all images come first, then all videos, then the text.
CHAT_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}\
{{ '<image>\\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}\
{{ '<video>\\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}\
{% if message['role'] == 'assistant' %}{% generation %}{{ content['text'] }}{% endgeneration %}\
{% else %}{{ content['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# A template that keeps the order of a turn's parts, and puts nothing between them.
ORDERED_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% for content in message['content'] %}{% if content['type'] == 'text' %}{{ content['text'] }}\
{% else %}{{ '<' + content['type'] + '>' }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As 384 pixels in patches of 14 give 27 x 27 patches and 14 x 14 pooled ones, with a rest.
IMAGE_SIZE, PATCH_SIZE = 38, 7  # 5 x 5 patches, 3 x 3 pooled


def pinpoints(image_size: int) -> list[list[int]]:
    """The hub's 36 sizes that an image may be cut to, in tiles of ``image_size``."""
    sides = [image_size * number for number in range(1, 7)]
    return [[height, width] for height in sides for width in sides]


def write_llava_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
    noise: float = 0.0,
    chat_template: str = CHAT_TEMPLATE,
) -> Path:
    """Saves a seeded random model with its processor to ``folder`` and returns it.

    The arguments are those of tests.support.models.checkpoints.write_checkpoint, and the chat
    template. Sizes are small; what decides the shape of prompts is as on the hub.
    """
    ensure_torchvision()
    transformers: Any = importlib.import_module("transformers")
    processor = llava_processor(chat_template)
    config = transformers.LlavaOnevisionConfig(
        text_config=text_config(processor.tokenizer),
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        image_grid_pinpoints=pinpoints(IMAGE_SIZE),
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
    )
    model = seeded_model(
        transformers.LlavaOnevisionForConditionalGeneration, config, seed, noise, vocab_size
    )
    return save_model(model, processor, folder)


def llava_processor(
    chat_template: str = CHAT_TEMPLATE,
    *,
    image_size: int = IMAGE_SIZE,
    patch_size: int = PATCH_SIZE,
) -> Any:
    """A processor with the hub's settings but for the sizes; 384 and 14 are the hub's."""
    ensure_torchvision()
    transformers: Any = importlib.import_module("transformers")
    settings: dict[str, Any] = {
        "size": {"height": image_size, "width": image_size},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            image_grid_pinpoints=pinpoints(image_size), **settings
        ),
        tokenizer=byte_tokenizer(transformers, ("t h", "th e", "i n", "a n"), SPECIAL_TOKENS),
        video_processor=transformers.LlavaOnevisionVideoProcessor(**settings),
        num_image_tokens=(image_size // patch_size) ** 2,
        vision_feature_select_strategy="full",
        chat_template=chat_template,
    )
