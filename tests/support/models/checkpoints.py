"""Small random Qwen-VL checkpoints, saved the way real ones are, for tests that need a model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hippo.models.loading._torchvision import ensure_torchvision

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
    seed: int = 0,
    num_layers: int = 3,
    num_heads: int = 4,
    head_dim: int = 16,
    intermediate_size: int = 128,
    vocab_size: int | None = None,
    merges: tuple[str, ...] = ("t h", "th e", "i n", "a n"),
    noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    vision: Mapping[str, int] = MappingProxyType({}),
) -> Path:
    """Saves a seeded random model with its processor to ``folder`` and returns it.

    ``family`` is a ``model_type`` of the Qwen-VL families; Qwen3's heads are twice as large.
    ``vocab_size`` above the tokenizer's length leaves rows that no token has; other ``merges``
    make another tokenizer. ``noise`` (a share of each weight's spread) perturbs the seed's
    weights: a pair of seed-equal models, one of them noisy, agrees on some of its tokens.
    ``vision`` sets other sizes of the vision tower.
    """
    ensure_torchvision()
    transformers: Any = importlib.import_module("transformers")
    form = _FORMS[family]
    form = replace(form, vision={**form.vision, **vision})
    processor = _processor(transformers, form, merges)
    tokenizer = processor.tokenizer
    text = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "hidden_size": head_dim * num_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": len(tokenizer),
    }
    config = _config(transformers, form, tokenizer, text, head_dim)
    architecture = getattr(transformers, f"{form.prefix}ForConditionalGeneration")
    model = seeded_model(architecture, config, seed, noise, vocab_size)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[
            tokenizer.convert_tokens_to_ids("<|im_end|>"),
            tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        ],
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        do_sample=True,
        temperature=0.1,
        repetition_penalty=1.5,  # what a server must not apply unasked
    )
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    processor.save_pretrained(folder)
    return folder


def seeded_model(
    architecture: Any, config: Any, seed: int, noise: float = 0.0, vocab_size: int | None = None
) -> Any:
    """A model with random weights by ``seed``, perturbed by ``noise``; see write_checkpoint.

    The vocabulary grows to ``vocab_size`` at the end, so that a seed gives the same weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture(config)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight") or any(n in name for n in ("norm1", "norm2", "norm_")):
                weight.data.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "cls_token", "position_embeddings")):
                weight.data.normal_(0.0, 0.1)
        if noise:
            torch.manual_seed(seed + 1)
            for weight in model.parameters():
                weight.data.add_(torch.randn_like(weight) * noise * weight.std())
        if vocab_size:
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


def text_config(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """A small language model of Qwen2's form."""
    return {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        **changes,
    }


def save_model(model: Any, processor: Any, folder: Path) -> Path:
    """Saves both, with the tokenizer's end token."""
    transformers: Any = importlib.import_module("transformers")
    end_id = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = transformers.GenerationConfig(eos_token_id=end_id)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def byte_tokenizer(
    transformers: Any,
    merges: tuple[str, ...],
    special_tokens: tuple[str, ...],
    num_words: int = 0,
    named_tokens: Mapping[str, str] | None = None,
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
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(named_tokens or {}),
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """What tells one Qwen-VL family from another."""

    prefix: str  # of its classes in transformers
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    patch_size: int = 14
    head_factor: int = 1  # of head_dim, which then is not hidden_size / num_heads


_SMALL_TOWER = {"depth": 2, "num_heads": 2, "initializer_range": 0.12}
_DEEP_TOWER = {
    **_SMALL_TOWER,
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],  # a dense layer in between
}
_FORMS: Mapping[str, _Form] = {
    "qwen2_vl": _Form("Qwen2VL", {**_SMALL_TOWER, "embed_dim": 32, "mlp_ratio": 2}, {}),
    "qwen2_5_vl": _Form(
        "Qwen2_5_VL",
        {
            **_SMALL_TOWER,
            "hidden_size": 32,
            "intermediate_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        {},
    ),
    "qwen3_vl": _Form("Qwen3VL", _DEEP_TOWER, {}, patch_size=16, head_factor=2),
    "qwen3_vl_moe": _Form("Qwen3VLMoe", _DEEP_TOWER, _EXPERTS, patch_size=16, head_factor=2),
}


def _processor(transformers: Any, form: _Form, merges: tuple[str, ...]) -> Any:
    tokenizer = byte_tokenizer(transformers, merges, SPECIAL_TOKENS)
    side = 2 * form.patch_size
    settings: dict[str, Any] = {
        "size": {"shortest_edge": side**2, "longest_edge": side**2 * 256},
        "patch_size": form.patch_size,
    }
    kind = form.prefix.removesuffix("Moe")  # without a processor of its own
    videos = "Qwen3VLVideoProcessor" if kind == "Qwen3VL" else "Qwen2VLVideoProcessor"
    if kind == "Qwen3VL":
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return getattr(transformers, f"{kind}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**settings),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, videos)(**settings, cap_pixels_per_frame=False),
        chat_template=CHAT_TEMPLATE,
    )


def _config(
    transformers: Any, form: _Form, tokenizer: Any, text: dict[str, int], head_dim: int
) -> Any:
    vision = dict(form.vision)
    # Qwen2-VL's tower calls the width of the language model its hidden size.
    vision["hidden_size" if "embed_dim" in vision else "out_hidden_size"] = text["hidden_size"]
    head_dim *= form.head_factor
    third = head_dim // 6
    return getattr(transformers, f"{form.prefix}Config")(
        text_config={
            **text,
            **form.text,
            **({"head_dim": head_dim} if form.head_factor > 1 else {}),
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "initializer_range": 0.12,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [head_dim // 2 - 2 * third, third, third],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        },
        vision_config={**vision, "patch_size": form.patch_size},
        initializer_range=0.12,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
