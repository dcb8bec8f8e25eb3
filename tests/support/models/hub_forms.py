"""The repositories that the README names, as their files are on the hub, but small and random.

Written from what the hub's configuration files say: flat or nested, with which keys, under which
weight names, in how many files, with the vocabulary padded beyond the tokenizer. Shrunk are
widths, depths and ids only: a vision tower's grid, the processors' settings and the ratios of
heads are the published ones. Qwen's files other than weights are also written at published sizes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from hippo.catalog.public_models import PUBLIC_CONFIGS
from hippo.models.loading.resolve import import_transformers
from tests.support.models import checkpoints, internvl, llava
from tests.support.models.hub_configs import PREPROCESSORS, hub_config

NUM_QWEN_IDS = 151_665  # of the published tokenizer, special tokens included


@dataclass(frozen=True, slots=True)
class HubForm:
    """What tells one repository from another."""

    num_heads: int
    num_kv_heads: int
    num_padding_ids: int  # rows that no token has
    is_tied: bool = False
    is_sharded: bool = True
    rope_scaling_type: str = "mrope"  # of Qwen2.5-VL
    width: int = 0  # of the text model, if it is not that of all heads
    has_large_tower: bool = False  # InternVL's of 6B
    num_value_heads: int = 2  # of layers with a state


HUB_FORMS = {
    "Qwen/Qwen2-VL-2B-Instruct": HubForm(6, 1, 44, is_tied=True),
    "Qwen/Qwen2-VL-7B-Instruct": HubForm(7, 1, 60),
    "Qwen/Qwen2-VL-72B-Instruct": HubForm(8, 1, 60),
    "Qwen/Qwen2.5-VL-3B-Instruct": HubForm(8, 1, 36, is_tied=True),
    "Qwen/Qwen2.5-VL-7B-Instruct": HubForm(7, 1, 52),
    "Qwen/Qwen2.5-VL-32B-Instruct": HubForm(10, 2, 52, rope_scaling_type="default"),
    "Qwen/Qwen2.5-VL-72B-Instruct": HubForm(8, 1, 52),
    "Qwen/Qwen3-VL-2B-Instruct": HubForm(6, 3, 32, is_tied=True, is_sharded=False),
    "Qwen/Qwen3-VL-4B-Instruct": HubForm(16, 4, 32, is_tied=True, width=128),
    "Qwen/Qwen3-VL-8B-Instruct": HubForm(8, 2, 32),
    "Qwen/Qwen3-VL-32B-Instruct": HubForm(16, 2, 32, width=128),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": HubForm(8, 1, 32, width=64),
    "Qwen/Qwen3.5-0.8B": HubForm(4, 1, 32, is_tied=True, is_sharded=False),
    "Qwen/Qwen3.5-27B": HubForm(8, 1, 32, width=128, num_value_heads=4),
    "Qwen/Qwen3.5-35B-A3B": HubForm(8, 1, 32, width=64, num_value_heads=4),
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": HubForm(7, 1, 39, is_tied=True, is_sharded=False),
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": HubForm(14, 2, 55),
    "llava-hf/llava-onevision-qwen2-72b-ov-hf": HubForm(8, 1, 55),
    "OpenGVLab/InternVL3_5-1B-HF": HubForm(4, 2, 45, is_sharded=False),
    "OpenGVLab/InternVL3_5-8B-HF": HubForm(8, 2, 45),
    "OpenGVLab/InternVL3_5-38B-HF": HubForm(8, 1, 45, has_large_tower=True),
}


FAMILY_FORMS = {str(PUBLIC_CONFIGS[name]["model_type"]): name for name in reversed(HUB_FORMS)}
"""Of each family its smallest repository."""


def write_hub_form(folder: Path, name: str, *, noise: float = 0.0) -> Path:
    """Saves the small counterpart of the hub's repository ``name`` to ``folder``; ``noise`` is that
    of write_checkpoint."""
    transformers = import_transformers()
    form, family = HUB_FORMS[name], family_of(name)
    texts: Any = {"internvl": internvl, "llava_onevision": llava}.get(family, checkpoints)
    named = internvl.NAMED_TOKENS if family == "internvl" else {}
    tokenizer = checkpoints.byte_tokenizer(
        ("t h", "th e"), texts.SPECIAL_TOKENS, named_tokens=named
    )
    config = hub_config(family, form, tokenizer.get_vocab())
    _write_files(folder, tokenizer, texts.CHAT_TEMPLATE, config)
    changes = {"tie_word_embeddings": False} if family == "internvl" else {}
    model = checkpoints.seeded_model(
        getattr(transformers, config["architectures"][0]),
        transformers.AutoConfig.from_pretrained(folder, **changes),
        noise,
    )
    dtype = torch.float16 if family == "llava_onevision" else torch.bfloat16
    weights = {
        hub_name(key, family): (weight.mT if is_turned(key, family) else weight)
        .to(dtype)
        .contiguous()
        for key, weight in model.state_dict().items()
        if not (form.is_tied and key == "lm_head.weight")
    }
    if family.startswith("qwen3_5"):  # a layer of multi-token prediction, which is not served
        weights["mtp.norm.weight"] = torch.zeros(8, dtype=dtype)
    size = sum(weight.nbytes for weight in weights.values())
    save_torch_state_dict(
        weights, folder, max_shard_size=size * 2 // 3 if form.is_sharded else size
    )
    return folder


def is_turned(key: str, family: str) -> bool:
    """Whether experts are [experts, in, out] on the hub, the other way round in transformers."""
    return ".experts." in key and family == "qwen3_vl_moe"


def family_of(name: str) -> str:
    return str(PUBLIC_CONFIGS[name]["model_type"])


def write_qwen_files(
    folder: Path,
    name: str,
    *,
    num_layers: int | None = None,
    chat_template: str = checkpoints.CHAT_TEMPLATE,
    is_published_size: bool,
) -> Any:
    """Writes all files of Qwen's repository ``name`` but its weights; returns the tokenizer.

    The sizes are those of the small counterpart, or the published ones, with the published number
    of ids; ``num_layers`` sets another depth of the language model. The tokenizer has words that
    no text is encoded to.
    """
    merges, special_tokens = ("t h", "th e"), checkpoints.SPECIAL_TOKENS
    num_others = 256 + len(merges) + len(special_tokens)
    num_words = NUM_QWEN_IDS - num_others if is_published_size else 200
    tokenizer = checkpoints.byte_tokenizer(merges, special_tokens, num_words)
    config = hub_config(family_of(name), HUB_FORMS[name], tokenizer.get_vocab())
    if is_published_size:
        public = PUBLIC_CONFIGS[name]
        config |= public["text_config"]
        config["rope_scaling"]["mrope_section"] = [16, 24, 24]
        config["vision_config"] |= {
            **public["vision_config"],
            "num_heads": 16,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "out_hidden_size": config["hidden_size"],
        }
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    _write_files(folder, tokenizer, chat_template, config)
    return tokenizer


def _write_files(folder: Path, tokenizer: Any, chat_template: str, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    ids, family = tokenizer.get_vocab(), config["model_type"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = internvl.NAMED_TOKENS if family == "internvl" else {}
    settings |= {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": named}
    for name, content in {
        "tokenizer_config.json": settings,
        "chat_template.json": {"chat_template": chat_template},
        "config.json": config,
        **PREPROCESSORS[family],
        "generation_config.json": {
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2))


_EARLIER_QWEN = {"model.visual.": "visual.", "model.language_model.": "model."}
_HUB_PREFIXES = {
    "qwen2_5_vl": _EARLIER_QWEN,
    "qwen2_vl": _EARLIER_QWEN,
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "llava_onevision": {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.": "",
    },
    "internvl": {  # transformers 4 saved the language model as a model of its own
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.": "",
    },
}


def hub_name(key: str, family: str) -> str:
    """The hub's name of a weight that the installed transformers calls ``key``."""
    for prefix, replacement in _HUB_PREFIXES[family].items():
        if key.startswith(prefix):
            return replacement + key.removeprefix(prefix)
    return key
