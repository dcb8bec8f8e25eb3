"""A small random checkpoint of each model family."""

from pathlib import Path
from typing import Any

from hippo.base.thoughts import BEGIN, END
from hippo.models.loading.resolve import import_transformers
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.internvl import write_internvl_checkpoint
from tests.support.models.llava import ORDERED_TEMPLATE, write_llava_checkpoint

QWEN_FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)
HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Some of their layers have a state in place of keys and values."""

ALL_FAMILIES = (*QWEN_FAMILIES, "llava_onevision", "internvl")
ORDERED_LLAVA = "llava_onevision, parts in order"
# As in Qwen3.5's and 3.8's templates: the thought is begun by default, an empty one if it is turned
# off, and of earlier turns thoughts are kept only if asked for.
THINKING = """\
{% set last = namespace(user=0) %}{% for message in messages %}{% if message.role == 'user' %}\
{% set last.user = loop.index0 %}{% endif %}{% endfor %}\
{% if reasoning_effort is defined %}\
{% if reasoning_effort not in ('low', 'high') %}{{ raise_exception('no such effort') }}{% endif %}\
<|im_start|>system
Effort: {{ reasoning_effort }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content is string and (preserve_thinking or loop.index0 > last.user) %}\
<think>
{{ message.reasoning_content|trim }}
</think>

{% endif %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text|trim }}\
{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
ALWAYS_THINKING = THINKING.replace(
    "enable_thinking is defined and enable_thinking is false", "false"
)
"""Of a template that does not ask, as Qwen3-VL's Thinking checkpoints have."""


def write_family(folder: Path, family: str, **saved: Any) -> Path:
    """Saves a checkpoint of ``family`` (a ``model_type``, or ORDERED_LLAVA); ``saved`` are
    arguments of save_random."""
    if family in QWEN_FAMILIES:
        return write_checkpoint(folder, family=family, **saved)
    if family == "internvl":
        return write_internvl_checkpoint(folder, **saved)
    templates = {"chat_template": ORDERED_TEMPLATE} if family == ORDERED_LLAVA else {}
    return write_llava_checkpoint(folder, **templates, **saved)


def write_thinking(folder: Path, *, template: str = THINKING, **saved: Any) -> Path:
    """Saves a Qwen3-VL whose vocabulary has the markers; ``saved`` are arguments of save_random."""
    write_family(folder, "qwen3_vl", vocab_size=300, **saved)
    processor = import_transformers().AutoProcessor.from_pretrained(folder)
    processor.tokenizer.add_tokens([BEGIN, END])  # not special, as Qwen3's
    processor.chat_template = template
    processor.save_pretrained(folder)
    return folder
