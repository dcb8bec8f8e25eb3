"""Small random Qwen-VL checkpoints, saved the way real ones are, for tests that need a model."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hippo.models.loading.resolve import import_transformers

MERGES = ("t h", "th e", "i n", "a n")
# Of a vision tower that is not Qwen's.
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}\
{% set image_count.value = image_count.value + 1 %}\
{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}\
<|vision_start|><|image_pad|><|vision_end|>\
{% elif content['type'] == 'video' or 'video' in content %}\
{% set video_count.value = video_count.value + 1 %}\
{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}\
<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_checkpoint(
    folder: Path,
    *,
    family: str = "qwen2_5_vl",
    num_layers: int = 3,
    num_heads: int = 4,
    head_dim: int = 16,
    intermediate_size: int = 128,
    merges: tuple[str, ...] = MERGES,
    vision: Mapping[str, int] = MappingProxyType({}),
    **saved: Any,
) -> Path:
    """Saves a seeded random model with its processor to ``folder`` and returns it.

    ``family`` is a ``model_type`` of the Qwen-VL families; Qwen3's heads have a size of their own.
    Other ``merges`` make another tokenizer; ``vision`` sets other sizes of the vision tower, and
    ``saved`` are arguments of save_random.
    """
    prefix, form, text = _FORMS[family]
    processor = _processor(prefix, form["patch_size"], merges)
    ids = processor.tokenizer.get_vocab()
    width = head_dim * num_heads
    rotated = int(text.get("head_dim", head_dim) * text.get("partial_rotary_factor", 1.0))
    third, half = rotated // 6, rotated // 2
    # Qwen2-VL's tower calls the width of the language model its hidden size.
    name = "hidden_size" if "embed_dim" in form else "out_hidden_size"
    config = getattr(import_transformers(), f"{prefix}Config")(
        text_config=text_config(
            processor.tokenizer,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            hidden_size=width,
            intermediate_size=intermediate_size,
            initializer_range=0.12,
            rope_parameters=_ROPE | {"mrope_section": [half - 2 * third, third, third]},
            **text,
        ),
        vision_config={**form, **vision, name: width},
        initializer_range=0.12,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return save_random(
        f"{prefix}ForConditionalGeneration",
        config,
        processor,
        folder,
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
        do_sample=True,
        temperature=0.1,
        repetition_penalty=1.5,  # what a server must not apply unasked
        **saved,
    )


def save_random(
    architecture: str,
    config: Any,
    processor: Any,
    folder: Path,
    *,
    noise: float = 0.0,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    **generation: Any,
) -> Path:
    """Saves a seeded model and its processor to ``folder`` and returns it.

    A model with ``noise`` agrees with the one without on some of its tokens. ``vocab_size`` above
    the tokenizer's length leaves rows that no token has; the vocabulary grows to it at the end, so
    that weights are the same. ``generation`` is the generation_config.json.
    """
    transformers = import_transformers()
    model = seeded_model(getattr(transformers, architecture), config, noise, vocab_size)
    end_id = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = transformers.GenerationConfig(**{"eos_token_id": end_id} | generation)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    processor.save_pretrained(folder)
    return folder


def seeded_model(
    architecture: Any, config: Any, noise: float = 0.0, vocab_size: int | None = None
) -> Any:
    """A model with seeded random weights, perturbed by ``noise``, a share of each one's spread."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = architecture(config)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight") or any(n in name for n in ("norm1", "norm2", "norm_")):
                is_added_to_one = name.endswith("weight") and not weight.any()
                least = -0.5 if is_added_to_one else 0.5
                weight.data.uniform_(least, least + 1)
            elif name.endswith(("bias", "cls_token", "position_embeddings")):
                weight.data.normal_(0.0, 0.1)
        if noise:
            torch.manual_seed(1)
            for weight in model.parameters():
                weight.data.add_(torch.randn_like(weight) * noise * weight.std())
        if vocab_size:
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def text_config(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _ROPE,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        **changes,
    }


def byte_tokenizer(
    merges: tuple[str, ...],
    special_tokens: tuple[str, ...],
    num_words: int = 0,
    named_tokens: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """A tokenizer of bytes, a few merges, words that no text is encoded to, and the special
    tokens; ``named_tokens`` are those that the tokenizer has as attributes."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += [f"Ġw{number}" for number in range(num_words)]
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(named_tokens),
    )


_TOWER = {"depth": 2, "num_heads": 2, "initializer_range": 0.12, "patch_size": 14}
_DEEP_TOWER = {
    **_TOWER,
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "patch_size": 16,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],  # a dense layer in between
}
_HYBRID = {
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_PLAIN_TOWER = {key: value for key, value in _DEEP_TOWER.items() if "deepstack" not in key}
# By family the prefix of its classes in transformers, its tower, and what its text model adds.
_FORMS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {**_TOWER, "embed_dim": 32, "mlp_ratio": 2}, {}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            **_TOWER,
            "hidden_size": 32,
            "intermediate_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        {},
    ),
    "qwen3_vl": ("Qwen3VL", _DEEP_TOWER, {"head_dim": 32}),
    "qwen3_vl_moe": ("Qwen3VLMoe", _DEEP_TOWER, {"head_dim": 32, **_EXPERTS}),
    "qwen3_5": ("Qwen3_5", _PLAIN_TOWER, _HYBRID),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        _PLAIN_TOWER,
        {
            **_HYBRID,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
}


def _processor(prefix: str, patch_size: int, merges: tuple[str, ...]) -> Any:
    transformers = import_transformers()
    side = 2 * patch_size
    settings: dict[str, Any] = {
        "size": {"shortest_edge": side**2, "longest_edge": side**2 * 256},
        "patch_size": patch_size,
    }
    kind = prefix.removesuffix("Moe")  # without a processor of its own, as Qwen3.5 is
    kind = "Qwen3VL" if kind == "Qwen3_5" else kind
    videos = "Qwen3VLVideoProcessor" if kind == "Qwen3VL" else "Qwen2VLVideoProcessor"
    if kind == "Qwen3VL":
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return getattr(transformers, f"{kind}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**settings),
        tokenizer=byte_tokenizer(merges, SPECIAL_TOKENS),
        video_processor=getattr(transformers, videos)(**settings, cap_pixels_per_frame=False),
        chat_template=CHAT_TEMPLATE,
    )
