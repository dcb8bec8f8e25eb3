"""The draft in training: transformers' own model, fed with the rows that serving gives it.

Only the language model and its head run; the vision tower's features come from the examples.
"""

import importlib
import logging
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hippo.errors import HippoError, ModelLoadError
from hippo.lab.distill.batches import ExampleBatch
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.loading.placement import dtype_of
from hippo.models.loading.pretrained import num_token_ids
from hippo.models.loading.resolve import import_transformers
from hippo.models.loading.weights import reported

_TOKEN_WEIGHT = 0.3  # weight of the target's token beside its distribution
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pth")


def load_draft(folder: Path, dtype: torch.dtype | str) -> Any:
    """Returns transformers' model of a checkpoint, on the CPU. Raises ModelLoadError."""
    transformers = import_transformers()
    try:
        with reported(_untold):
            return transformers.AutoModelForImageTextToText.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa"
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{folder}: its weights cannot be read: {error}") from error


def tokenizer_of(folder: Path) -> Any:
    """Returns a checkpoint's tokenizer. Raises ModelLoadError."""
    transformers = import_transformers()
    try:
        return transformers.AutoProcessor.from_pretrained(folder).tokenizer
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"{folder}: its processor cannot be read: {error}") from error


class Student(nn.Module):
    """The language model of a draft with its head; logits are cut to the tokenizer's ids.

    ``model`` is transformers' model, whose weights are shared and not copied. Its vision tower is
    frozen, and with ``lora_rank`` all but the adapters (peft) of the language model's products.
    """

    def __init__(self, model: Any, num_ids: int, *, lora_rank: int | None = None) -> None:
        super().__init__()
        model.requires_grad_(False)
        if lora_rank is None:
            model.model.language_model.requires_grad_(True)
            model.lm_head.requires_grad_(True)
        else:
            model = _with_adapters(model, lora_rank)
        inner = model if lora_rank is None else model.get_base_model()
        self.language_model: Any = inner.model.language_model
        self.head: Any = inner.lm_head
        self._num_ids = num_ids
        self._whole = [model]  # in a list, so that the tower is no part of this module

    def forward(self, batch: ExampleBatch) -> torch.Tensor:
        """Returns the logits ``[num_answer_tokens, num_ids]`` of the answers' tokens."""
        hidden = self.language_model.get_input_embeddings()(batch.input_ids)
        width = hidden.shape[-1]
        features = batch.features.to(hidden.dtype)
        hidden = hidden.masked_scatter(batch.is_visual[..., None], features[:, :width])
        deepstack: dict[str, Any] = {}
        if features.shape[1] > width:
            deepstack = {
                "visual_pos_masks": batch.is_visual,
                "deepstack_visual_embeds": list(torch.split(features[:, width:], width, 1)),
            }
        output = self.language_model(
            inputs_embeds=hidden,
            position_ids=batch.positions if batch.positions.shape[0] > 1 else batch.positions[0],
            # Without a mask, transformers takes gaps of positions for borders of sequences. With
            # padding on the right a causal mask is right, for which this stands.
            attention_mask=torch.ones_like(batch.input_ids),
            use_cache=False,
            **deepstack,
        ).last_hidden_state
        logits: torch.Tensor = self.head(output[batch.is_asked])
        return logits[:, : self._num_ids]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The weights that are trained, by name."""
        return {name: weight for name, weight in self.named_parameters() if weight.requires_grad}

    def load_trained(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies earlier values into the trained weights."""
        with torch.no_grad():
            for name, weight in self.trained.items():
                weight.copy_(weights[name])

    def save_checkpoint(self, folder: Path, source: Checkpoint) -> None:
        """Writes a checkpoint in the dtype of ``source`` and with its other files, adapters merged,
        whole or not at all. Afterwards the module cannot be trained any more.

        Raises HippoError if it cannot be written.
        """
        model = self._whole[0]
        if hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()
        plan = LoadPlan(source.name)
        model = model.to("cpu", dtype=dtype_of(plan, source, torch.device("meta")))
        model.generation_config = type(model.generation_config)()  # the source's is copied below
        partial = folder.with_name(folder.name + ".partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            with reported(_untold):
                model.save_pretrained(partial)
            (partial / "generation_config.json").unlink(missing_ok=True)
            without_weights = shutil.ignore_patterns(*_WEIGHT_FILES)
            shutil.copytree(source.folder, partial, ignore=without_weights, dirs_exist_ok=True)
            partial.rename(folder)
        except OSError as error:
            raise HippoError(f"{folder} cannot be written: {error}") from None


def _untold(share: float) -> None:
    """Tells nobody how much is read or written."""


def _with_adapters(model: Any, rank: int) -> Any:
    for name in ("peft", "bitsandbytes"):  # about kernels for other devices
        logging.getLogger(name).setLevel(logging.ERROR)
    peft: Any = importlib.import_module("peft")
    names = [
        f"model.language_model.{name}"
        for name, module in model.model.language_model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    with warnings.catch_warnings():  # peft reads an attribute that transformers has renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        return peft.get_peft_model(model, config)


def new_student(folder: Path, dtype: torch.dtype | str, *, lora_rank: int | None) -> Student:
    """Returns the student of a checkpoint, on the CPU. Raises ModelLoadError."""
    model = load_draft(folder, dtype)
    num_ids = num_token_ids(tokenizer_of(folder), model.config.text_config.vocab_size)
    return Student(model, num_ids, lora_rank=lora_rank)


def distillation_loss(logits: torch.Tensor, batch: ExampleBatch) -> torch.Tensor:
    """Returns the cross entropy with the target's likeliest tokens and with the token it chose.

    logits: ``[num_answer_tokens, num_ids]``; the mean over the tokens.
    """
    own = functional.log_softmax(logits.float(), dim=-1)
    soft = -(batch.top_logprobs.exp() * own.gather(1, batch.top_ids)).sum(1).mean()
    return soft + _TOKEN_WEIGHT * functional.nll_loss(own, batch.answer_ids)


def agreements(logits: torch.Tensor, batch: ExampleBatch) -> list[str]:
    """Returns the trace of each example of the batch: "1" for each token of the target's answer
    that the draft proposes there, else "0"."""
    marks = (logits.argmax(-1) == batch.answer_ids).tolist()
    traces = []
    for count in batch.is_asked.sum(1).tolist():
        traces.append("".join("1" if mark else "0" for mark in marks[:count]))
        marks = marks[count:]
    return traces
