"""The pair's tokenizer: byte-level BPE trained on the world's texts, in Qwen's format."""

from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from demo.training.models import SpecialIds
from demo.world import scenes as world
from demo.world import texts
from hippo.models.loading._torchvision import ensure_torchvision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
VOCABULARY = 512
# Qwen's pre-tokenizer: splits text into words.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part['type'] == 'video' or 'video' in part or 'video_url' in part -%}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in part -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def world_texts(count: int, seed: int) -> "Iterator[str]":
    """Yields questions and answers about `count` scenes, with the roles of a chat."""
    rng = np.random.default_rng((seed, 2))
    yield "system\nYou are a helpful assistant."
    yield from (f"{item.question} {item.answer}" for item in texts.SMALL_TALK)
    for _ in range(count):
        scene = world.sample_scene(rng, height=336, width=336, duration_s=4.0, max_objects=9)
        for exchange in texts.descriptions(scene, rng) + texts.short_questions(scene, rng, 7):
            yield f"user\n{exchange.question}"
            yield f"assistant\n{exchange.answer}"


def train_tokenizer(*, num_scenes: int = 1500, seed: int = 0) -> "PreTrainedTokenizerBase":
    """Returns the trained tokenizer, as transformers' Qwen2 tokenizer with the chat template."""
    ensure_torchvision()
    from transformers import Qwen2Tokenizer

    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(world_texts(num_scenes, seed), trainer)
    core.add_special_tokens(list(SPECIAL_TOKENS))
    made: PreTrainedTokenizerBase = Qwen2Tokenizer(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    return made


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> SpecialIds:
    """Returns the ids of the special tokens for the model configurations."""
    names = (
        "<|endoftext|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    ids = [int(tokenizer.convert_tokens_to_ids(name)) for name in names]
    return SpecialIds(*ids)
