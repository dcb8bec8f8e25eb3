"""Loads a checkpoint of any family: transformers' model and processor, decoder stack and cache."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hippo.errors import ModelLoadError
from hippo.models._torchvision import ensure_torchvision
from hippo.models.cache import CacheShape, KeyValueCache, cache_dtype
from hippo.models.checkpoint import Checkpoint, Progress
from hippo.models.decoder import DecoderStack
from hippo.models.fixed import CAPTURED_ROWS, FixedRunner, graph_bytes, spare_places
from hippo.models.graphs import CudaGraphs
from hippo.models.linear import (
    MakeLinear,
    is_plain,
    make_half_linear,
    make_linear,
    packs_weights,
    padded_rows,
)
from hippo.models.memory import MemoryNeeds, check_fits, choose_slots, device_uuids, fitting_slots
from hippo.models.placement import device_of, dtype_of
from hippo.models.plan import LoadPlan
from hippo.models.quantized import Quantization, find_quantization
from hippo.models.weights import read_weights
from hippo.sizes import shape_of
from hippo.types import ModelInfo

if TYPE_CHECKING:
    from hippo.parallel.shards import Shards


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
    make_linear: MakeLinear  # makes products for the vision tower
    padded: Callable[[int], int]  # from a number of rows to the number to run, padding included
    fixed: FixedRunner | None = None  # None: the plan asks for no forwards of fixed shape


def load_pretrained(
    checkpoint: Checkpoint,
    architecture: str,
    plan: LoadPlan,
    progress: Progress,
    shards: Shards | None,
) -> Pretrained:
    """Loads a checkpoint as ``transformers.<architecture>``, whose text model is Qwen2-style.

    With ``shards`` this process is one of several ranks and loads its part of layers and cache.
    Raises ModelLoadError.
    """
    ensure_torchvision()
    transformers: Any = importlib.import_module("transformers")  # its own hints are partial
    config, processor = _read_configuration(transformers, checkpoint)
    _check_window(checkpoint.name, config.text_config, plan.max_context_length)
    quantization = find_quantization(plan, checkpoint, device_of(plan, shards))
    sizes = _sizes_of(plan, checkpoint, config, quantization, shards)
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
    stack = _make_stack(model, num_ids, make_product, shards)
    cache = _make_cache(plan, sizes, shards)
    end_ids = end_token_ids(model.generation_config, processor.tokenizer)
    info = _model_info(
        plan, checkpoint, sizes, processor.tokenizer, num_ids, end_ids, cache.shape.num_slots
    )
    fixed = _make_fixed_runner(plan, model, stack, cache)
    return Pretrained(model, processor, stack, cache, info, make_product, padded, fixed)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The dtypes of one rank's part of the model, and its sizes."""

    needs: MemoryNeeds
    devices: tuple[torch.device, ...]  # of all ranks
    working_dtype: torch.dtype  # of activations, and of the weights until they are packed
    cache_dtype: torch.dtype
    cache: CacheShape  # of one slot
    num_parameters: int


def _sizes_of(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    config: Any,
    quantization: Quantization | None,
    shards: Shards | None,
) -> _Sizes:
    """Derives sizes from the configuration; raises ModelLoadError as dtype_of does."""
    device = device_of(plan, shards)
    devices = (device,) if shards is None else shards.group.devices
    dtype = dtype_of(plan, checkpoint, device, quantization)
    is_half_on_cpu = dtype == torch.float16 and device.type == "cpu"
    working_dtype = torch.float32 if is_half_on_cpu else dtype
    kept_dtype = cache_dtype(working_dtype, device)
    text = config.text_config
    cache = _slot_shape(plan, text, len(devices))
    slot_bytes = cache.num_bytes(kept_dtype)
    shape = shape_of(checkpoint.name, config.to_dict())
    bytes_each, cache_each = working_dtype.itemsize, kept_dtype.itemsize
    work_bytes = shape.work_bytes(
        plan.max_context_length, bytes_each=bytes_each, cache_each=cache_each
    )
    if plan.has_graphs:
        slot_bytes += graph_bytes(text.num_hidden_layers)
        work_bytes += CAPTURED_ROWS[-1] * text.vocab_size * torch.float32.itemsize
    num_processes = devices.count(device)
    form = ", in float32 till they are packed" if is_half_on_cpu else ""
    if quantization is None:
        num_shared = shape.num_shared_parameters
        num_held = checkpoint.num_floats - num_shared + num_shared / len(devices)
        weight_bytes = int(num_processes * num_held * bytes_each)
    else:
        form += quantization.form
        weight_bytes = quantization.weight_bytes(checkpoint, shape, bytes_each)
    if not is_half_on_cpu and packs_weights(device) and shape.is_tied:
        weight_bytes += num_processes * shape.num_head_parameters * bytes_each  # the packed head
    needs = MemoryNeeds(
        name=checkpoint.name,
        device=device,
        dtype=dtype,
        form=form,
        weight_bytes=weight_bytes,
        slot_bytes=slot_bytes,
        work_bytes=work_bytes,
        host_bytes=shape.host_bytes(bytes_each) if device.type == "cuda" else 0,
        num_processes=num_processes,
    )
    return _Sizes(needs, devices, working_dtype, kept_dtype, cache, shape.num_parameters)


def _slot_shape(plan: LoadPlan, text: Any, num_ranks: int) -> CacheShape:
    """Returns the shape of one rank's cache for one slot."""
    num_spare = 0
    if plan.has_graphs or plan.exact_rows:
        num_spare = spare_places(plan.max_context_length, plan.exact_rows or CAPTURED_ROWS[-1])
    return CacheShape(
        num_layers=text.num_hidden_layers,
        num_slots=1,
        num_kv_heads=text.num_key_value_heads // num_ranks,
        capacity=plan.max_context_length,
        head_dim=text.hidden_size // text.num_attention_heads,
        num_spare=num_spare,
    )


def _read_configuration(transformers: Any, checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Reads configuration and processor; raises ModelLoadError."""
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
        return config, transformers.AutoProcessor.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ModelLoadError(
            f"{checkpoint.name}: its configuration, tokenizer or processor cannot be read: {error}"
        ) from error


def _check_window(name: str, text: Any, max_context_length: int) -> None:
    window: int = text.sliding_window if "sliding_attention" in text.layer_types else 0
    if 0 < window < max_context_length:
        raise ModelLoadError(
            f"{name}: its layers attend over a sliding window of {window} tokens, which is not "
            f"supported beyond it: set --max-context-length to at most {window}"
        )


def _choose_products(sizes: _Sizes) -> tuple[MakeLinear, Callable[[int], int]]:
    """Returns what makes matrix products, and Pretrained.padded for these products."""
    if sizes.working_dtype != sizes.needs.dtype:
        return make_half_linear, int
    return make_linear, padded_rows if packs_weights(sizes.needs.device) else int


def _make_stack(
    model: Any, num_ids: int, make_linear: MakeLinear, shards: Shards | None
) -> DecoderStack:
    """Makes the decoder layers from the weights of transformers' modules, which become empty."""
    if shards is not None:
        shards.unwrap(model)
    head = model.lm_head
    stack = DecoderStack(model.model.language_model, head, num_ids, make_linear, shards)
    if is_plain(head) and head.weight is not model.get_input_embeddings().weight:
        head.weight.data = head.weight.data.new_empty(0)  # the stack has the rows that it needs
    return stack


def _make_cache(plan: LoadPlan, sizes: _Sizes, shards: Shards | None) -> KeyValueCache:
    """Allocates as many slots as the plan names, or as fit on every rank's device."""
    num_fitting = fitting_slots(plan, sizes.needs)
    if shards is not None:
        num_fitting = shards.least(num_fitting)
    shape = replace(sizes.cache, num_slots=choose_slots(plan, sizes.needs, num_fitting))
    return KeyValueCache(shape, dtype=sizes.cache_dtype, device=sizes.needs.device)


def _model_info(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    sizes: _Sizes,
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
        max_context_length=plan.max_context_length,
        num_slots=num_slots,
        num_parameters=sizes.num_parameters,
        device_uuids=device_uuids(sizes.devices),
    )


def _make_fixed_runner(
    plan: LoadPlan, model: Any, stack: DecoderStack, cache: KeyValueCache
) -> FixedRunner | None:
    if not cache.shape.num_spare:
        return None
    return FixedRunner(
        stack,
        cache,
        model.get_input_embeddings().weight,
        exact_rows=plan.exact_rows,
        capture=CudaGraphs(cache.device).capture_graph if plan.has_graphs else None,
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
