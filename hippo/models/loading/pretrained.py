"""Loads a checkpoint of any family: transformers' model and processor, decoder stack and cache."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hippo.errors import ModelLoadError
from hippo.models.attention.cache import KeyValueCache
from hippo.models.attention.ranges import FlashUse, find_flash
from hippo.models.interface.checkpoint import Checkpoint, Progress
from hippo.models.interface.context import LEAST_CONTEXT, choose_context
from hippo.models.interface.plan import LoadPlan
from hippo.models.loading._torchvision import ensure_torchvision
from hippo.models.loading.footprint import ModelSizes
from hippo.models.loading.memory import (
    MemoryNeeds,
    check_fits,
    choose_slots,
    device_uuids,
    fitting_slots,
    left_for_slots,
    no_room,
)
from hippo.models.loading.placement import device_of
from hippo.models.loading.quantization import find_quantization, warn_of_mixing
from hippo.models.loading.weights import read_weights
from hippo.models.products.linear import (
    MakeLinear,
    is_plain,
    make_half_linear,
    make_linear,
    packs_weights,
    padded_rows,
)
from hippo.models.runners.captured import make_fixed_runner
from hippo.models.runners.decoder import DecoderStack
from hippo.models.runners.fixed import FixedRunner
from hippo.types import ModelInfo

if TYPE_CHECKING:
    from hippo.models.products.shards import Shards

_log = logging.getLogger(__name__)

# transformers imports torchao if it is installed, which warns about kernels for other devices.
_NOISY = ("torchao", "torch.utils._pytree")

# The part of "loading" in which weights are read; layers are packed after it.
_READ_FROM, _READ_TO = 0.1, 0.8


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A loaded checkpoint, from which CachedModel and the parts of its family are made."""

    model: Any  # transformers' model with its head, in evaluation mode, on the device
    processor: Any
    stack: DecoderStack  # holds the weights of the text model's layers, which are empty in model
    cache: KeyValueCache
    info: ModelInfo
    flash: FlashUse
    make_linear: MakeLinear  # makes products for the vision tower
    padded: Callable[[int], int]  # from a number of rows to the number to run, padding included
    fixed: FixedRunner | None = None  # None: the plan asks for no forwards of fixed shape
    frame_bytes: int = 0  # see VideoLanguageModel.frame_bytes
    feature_bytes: int = 0  # see VideoLanguageModel.feature_bytes


def load_pretrained(
    checkpoint: Checkpoint,
    architecture: str,
    plan: LoadPlan,
    progress: Progress,
    shards: Shards | None,
) -> Pretrained:
    """Loads a checkpoint as ``transformers.<architecture>``, whose text model has Qwen2's or
    Qwen3's layers.

    With ``shards`` this process is one of several ranks and loads its part of layers and cache.
    Raises ModelLoadError.
    """
    transformers = import_transformers()
    config, processor = _read_configuration(transformers, checkpoint)
    limit = _context_limit(checkpoint.name, config.text_config, plan.max_context_length)
    quantization = find_quantization(plan, checkpoint, device_of(plan, shards))
    sizes_of = partial(ModelSizes.of, plan, checkpoint, config, quantization, shards)
    sizes = sizes_of(plan.max_context_length or min(limit, LEAST_CONTEXT))
    warn_of_mixing(plan, checkpoint, quantization, sizes.working_dtype)
    check_fits(plan, sizes.needs)
    progress("loading", _READ_FROM)
    model = read_weights(
        checkpoint,
        getattr(transformers, architecture),
        config,
        sizes.working_dtype,
        device=sizes.needs.device,
        quantization=quantization,
        shards=shards,
        report=lambda share: progress("loading", _READ_FROM + (_READ_TO - _READ_FROM) * share),
    )
    model.eval().requires_grad_(False)
    num_ids = num_token_ids(processor.tokenizer, config.text_config.vocab_size)
    make_product, padded = _choose_products(sizes)
    if sizes.needs.device.type == "cpu" and (quantization is None or not quantization.is_kept):
        _copy_from_files(model, all_weights=make_product is make_linear and padded is int)
    stack = _make_stack(model, num_ids, make_product, shards)
    if shards is not None:
        shards.warm_up(config.text_config.hidden_size, sizes.working_dtype)
    left_bytes = left_for_slots(plan, sizes.needs)
    if plan.max_context_length is None:
        sizes = sizes_of(
            _fitting_context(plan, limit, lambda n: sizes_of(n).needs, left_bytes, shards)
        )
    cache = _make_cache(plan, sizes, left_bytes, shards)
    end_ids = end_token_ids(model.generation_config, processor.tokenizer)
    info = _model_info(
        plan, checkpoint, sizes, processor.tokenizer, num_ids, end_ids, cache.shape.num_slots
    )
    flash = find_flash(cache, stack.groups)
    fixed = make_fixed_runner(plan, stack, cache, model.get_input_embeddings().weight, flash)
    return Pretrained(
        model,
        processor,
        stack,
        cache,
        info,
        flash,
        make_product,
        padded,
        fixed,
        sizes.frame_bytes,
        sizes.feature_bytes,
    )


def import_transformers() -> Any:
    """Returns transformers, imported without the warnings of packages that it imports."""
    # Nothing is compiled by torch; a package that prepares it when it is imported takes seconds.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    ensure_torchvision()
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    return importlib.import_module("transformers")  # its own hints are partial


def _read_configuration(transformers: Any, checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Reads configuration and processor; raises ModelLoadError."""
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
        return config, transformers.AutoProcessor.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ModelLoadError(
            f"{checkpoint.name}: its configuration, tokenizer or processor cannot be read: {error}"
        ) from error


def _context_limit(name: str, text: Any, given: int | None) -> int:
    """Returns the most tokens of a sequence that the checkpoint allows; raises ModelLoadError if
    the context given is longer than its sliding window, or than what it was trained on if all
    positions would then be rotated in another way."""
    kinds = getattr(text, "layer_types", None)
    has_windows = kinds is None or "sliding_attention" in kinds
    window: int = (getattr(text, "sliding_window", None) or 0) if has_windows else 0
    if given is not None and 0 < window < given:
        raise ModelLoadError(
            f"{name}: its layers attend over a sliding window of {window} tokens, which is not "
            f"supported beyond it: set --max-context-length to at most {window}"
        )
    trained: int = text.max_position_embeddings
    if given is not None and given > trained:
        if text.rope_parameters.get("rope_type") == "dynamic":
            raise ModelLoadError(
                f"{name}: its rotary positions ('dynamic') change with the length of a sequence of "
                f"more than {trained} tokens, which is not supported: set --max-context-length to "
                f"at most {trained}"
            )
        _log.warning(
            "%s was trained on %d tokens; the context of %d allows longer prompts, and answers to "
            "them may be wrong",
            name,
            trained,
            given,
        )
    return min(window or trained, trained)


def _fitting_context(
    plan: LoadPlan,
    limit: int,
    needs_of: Callable[[int], MemoryNeeds],
    left_bytes: int,
    shards: Shards | None,
) -> int:
    """Returns the context length that fits beside the loaded weights on every rank's device;
    raises ModelLoadError if none does."""
    context = choose_context(
        limit,
        plan.num_slots,
        lambda tokens, slots: fitting_slots(plan, needs_of(tokens), left_bytes) >= slots,
    )
    if shards is not None:
        context = shards.least(context)
    least = min(limit, LEAST_CONTEXT)
    if context < least:
        raise no_room(plan, needs_of(least))
    _log.info(
        "context of %d tokens, of the %d that the checkpoint allows (--max-context-length)",
        context,
        limit,
    )
    return context


def _choose_products(sizes: ModelSizes) -> tuple[MakeLinear, Callable[[int], int]]:
    """Returns what makes matrix products, and Pretrained.padded for these products."""
    if sizes.working_dtype != sizes.needs.dtype:
        return make_half_linear, int
    packs = packs_weights(sizes.needs.device, sizes.needs.dtype)
    return make_linear, padded_rows if packs else int


def _make_stack(
    model: Any, num_ids: int, make_linear: MakeLinear, shards: Shards | None
) -> DecoderStack:
    """Makes the decoder layers from the weights of transformers' modules, which become empty."""
    if shards is not None:
        shards.unwrap(model)
    head = model.lm_head
    stack = DecoderStack(model.model.language_model, head, num_ids, make_linear, shards)
    if is_plain(head) and not _is_tied(model):
        head.weight.data = head.weight.data.new_empty(0)  # the stack has the rows that it needs
    return stack


def _copy_from_files(model: Any, *, all_weights: bool) -> None:
    """Copies weights: all, or all but those of the layers' products, which are packed.

    Weights may be views of the mapped weight files; a file stays in memory as long as one of its
    weights is in use.
    """
    packed = {id(part.weight) for part in model.model.language_model.modules() if is_plain(part)}
    if not _is_tied(model):
        packed.add(id(model.lm_head.weight))
    for weight in model.parameters():
        if all_weights or id(weight) not in packed:
            weight.data = weight.data.clone()


def _is_tied(model: Any) -> bool:
    same: bool = model.lm_head.weight is model.get_input_embeddings().weight
    return same


def _make_cache(
    plan: LoadPlan, sizes: ModelSizes, left_bytes: int, shards: Shards | None
) -> KeyValueCache:
    """Allocates as many slots as the plan names, or as fit on every rank's device."""
    num_fitting = fitting_slots(plan, sizes.needs, left_bytes)
    if shards is not None:
        num_fitting = shards.least(num_fitting)
    shape = replace(sizes.cache, num_slots=choose_slots(plan, sizes.needs, num_fitting))
    return KeyValueCache(shape, dtype=sizes.cache_dtype, device=sizes.needs.device)


def _model_info(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    sizes: ModelSizes,
    tokenizer: Any,
    num_ids: int,
    end_ids: tuple[int, ...],
    num_slots: int,
) -> ModelInfo:
    return ModelInfo(
        name=plan.served_name or checkpoint.name,
        family=checkpoint.model_type,
        device=str(sizes.needs.device),
        dtype=str(sizes.needs.dtype).removeprefix("torch."),
        tokenizer_hash=tokenizer_hash(tokenizer),
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        num_token_ids=num_ids,
        end_token_ids=end_ids,
        max_context_length=sizes.needs.context_length,
        num_slots=num_slots,
        num_parameters=sizes.num_parameters,
        device_uuids=device_uuids(sizes.devices),
        cache_tokens=sizes.cache.capacity,
    )


def tokenizer_hash(tokenizer: Any) -> bytes:
    """SHA-256 of the tokenizer's id map; models with the same ids have the same hash, even if
    their ``vocab_size`` differs."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
        digest.update(int(token_id).to_bytes(8, "little"))
    return digest.digest()


def num_token_ids(tokenizer: Any, vocab_size: int) -> int:
    """Returns the tokenizer's largest id plus one, to which logits are cut.

    Raises ModelLoadError if that exceeds ``vocab_size``.
    """
    count = 1 + max(tokenizer.get_vocab().values())
    if count > vocab_size:
        raise ModelLoadError(
            f"the tokenizer has {count} ids but the model only {vocab_size}: they are not of one "
            "checkpoint"
        )
    return int(count)


def end_token_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that end a completion, from the generation configuration or the tokenizer."""
    ids = generation_config.eos_token_id if generation_config is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
