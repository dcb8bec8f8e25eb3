"""Small random InternVL checkpoints."""

from pathlib import Path
from typing import Any

from hippo.models.loading.resolve import import_transformers
from tests.support.models.checkpoints import MERGES, TOWER, byte_tokenizer, save_random, text_config

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


def write_internvl_checkpoint(folder: Path, *, language: str = "qwen3", **saved: Any) -> Path:
    """Saves a seeded random model with its processor to ``folder`` and returns it.

    The language model is of "qwen3" with heads larger than hidden_size / num_heads, or of "qwen2"
    as in InternVL3; ``saved`` are arguments of save_random. The processor cuts an image into at
    most 4 tiles.
    """
    processor = internvl_processor()
    own = {"head_dim": 32} if language == "qwen3" else {}
    config = import_transformers().InternVLConfig(
        text_config=text_config(
            processor.tokenizer, model_type=language, tie_word_embeddings=False, **own
        ),
        vision_config={
            **TOWER,
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
    return save_random("InternVLForConditionalGeneration", config, processor, folder, **saved)


def internvl_processor() -> Any:
    transformers = import_transformers()
    settings: dict[str, Any] = {
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(max_patches=4, **settings),
        tokenizer=byte_tokenizer(MERGES, SPECIAL_TOKENS, named_tokens=NAMED_TOKENS),
        video_processor=transformers.InternVLVideoProcessor(**settings),
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE // 2) ** 2,
        chat_template=CHAT_TEMPLATE,
    )
