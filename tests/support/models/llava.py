"""Small random LLaVA-OneVision checkpoints."""

from pathlib import Path
from typing import Any

from hippo.models.loading.resolve import import_transformers
from tests.support.models.checkpoints import MERGES, TOWER, byte_tokenizer, save_random, text_config

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
    folder: Path, *, chat_template: str = CHAT_TEMPLATE, **saved: Any
) -> Path:
    """Saves a seeded random model with its processor to ``folder`` and returns it; ``saved`` are
    arguments of save_random. Sizes are small; what decides the shape of prompts is as on the hub.
    """
    processor = llava_processor(chat_template)
    config = import_transformers().LlavaOnevisionConfig(
        text_config=text_config(processor.tokenizer, model_type="qwen2"),
        vision_config={
            **TOWER,
            "model_type": "siglip_vision_model",
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        image_grid_pinpoints=pinpoints(IMAGE_SIZE),
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
    )
    architecture = "LlavaOnevisionForConditionalGeneration"
    return save_random(architecture, config, processor, folder, **saved)


def llava_processor(chat_template: str = CHAT_TEMPLATE) -> Any:
    transformers = import_transformers()
    settings: dict[str, Any] = {
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            image_grid_pinpoints=pinpoints(IMAGE_SIZE), **settings
        ),
        tokenizer=byte_tokenizer(MERGES, SPECIAL_TOKENS),
        video_processor=transformers.LlavaOnevisionVideoProcessor(**settings),
        num_image_tokens=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        vision_feature_select_strategy="full",
        chat_template=chat_template,
    )
