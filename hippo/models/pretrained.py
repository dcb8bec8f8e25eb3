"""What loading a checkpoint has in common in all families: transformers' parts, stack and cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from hippo.errors import ModelLoadError
from hippo.models._torchvision import ensure_torchvision
from hippo.models.cache import CacheShape, KeyValueCache, cache_dtype
from hippo.models.checkpoint import Checkpoint, Progress
from hippo.models.decoder import DecoderStack
from hippo.models.fixed import CAPTURED_ROWS, FixedRunner, graph_bytes, spare_places
from hippo.models.graphs import CudaGraphs
from hippo.models.linear import (
    MakeLinear,
    make_half_linear,
    make_linear,
    packs_weights,
    padded_rows,
)
from hippo.models.memory import Needs, check_fits, choose_slots, device_uuids, fitting_slots
from hippo.models.placement import device_of, dtype_of
from hippo.models.plan import LoadPlan
from hippo.sizes import shape_of
from hippo.types import ModelInfo

if TYPE_CHECKING:
    from hippo.parallel.shards import Shards


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A checkpoint in memory, ready for a family's adapter."""

    model: Any  # transformers' model with its head, in evaluation mode, on the device
    processor: Any
    stack: DecoderStack  # has taken over the weights of the text model's layers, if fused
    cache: KeyValueCache
    info: ModelInfo
    make_linear: MakeLinear  # the form of products
    padded: Callable[[int], int]  # how many rows a number of rows is best filled up to
    fixed: FixedRunner | None = None  # forwards of fixed shape, where they are asked for


def load_pretrained(
    checkpoint: Checkpoint,
    architecture: str,
    plan: LoadPlan,
    progress: Progress,
    shards: Shards | None,
) -> Pretrained:
    """Loads a checkpoint as ``transformers.<architecture>``, whose text model is Qwen2-style.

    ``shards``: this process is one of several ranks, and holds its part of the layers and the
    cache. Raises ModelLoadError.
    """
    ensure_torchvision()
    transformers: Any = importlib.import_module("transformers")  # its own hints are partial
    device = device_of(plan, shards)
    config, processor = _read_configuration(transformers, checkpoint)
    _check_window(checkpoint.name, config.text_config, plan.max_context_length)
    sizes = _Sizes.of(plan, checkpoint, config, device, shards)
    check_fits(plan, sizes)
    progress("loading", 0.1)
    model = _read_weights(transformers, checkpoint, architecture, sizes, shards)
    model.eval().requires_grad_(False).to(device)
    progress("loading", 0.7)
    num_ids = num_token_ids(processor.tokenizer, config.text_config.vocab_size)
    make_product: MakeLinear = make_linear
    padded: Callable[[int], int] = padded_rows if packs_weights(device) else int
    if sizes.working_dtype != sizes.dtype:
        make_product, padded = make_half_linear, int
    stack = _make_stack(model, num_ids, make_product, shards)
    num_fitting = fitting_slots(plan, sizes)
    if shards is not None:
        num_fitting = shards.least(num_fitting)  # on every rank's device
    num_slots = choose_slots(plan, sizes, num_fitting)
    cache = KeyValueCache(
        replace(sizes.cache, num_slots=num_slots), dtype=sizes.cache_dtype, device=device
    )
    info = ModelInfo(
        name=plan.served_name or checkpoint.name,
        family=checkpoint.model_type,
        device=str(device),
        dtype=str(sizes.dtype).removeprefix("torch."),
        tokenizer_hash=tokenizer_hash(processor.tokenizer),
        tokenizer_json=processor.tokenizer.backend_tokenizer.to_str().encode(),
        num_token_ids=num_ids,
        end_token_ids=end_token_ids(model.generation_config, processor.tokenizer),
        max_context_length=plan.max_context_length,
        num_slots=num_slots,
        num_parameters=checkpoint.num_parameters,
        device_uuids=device_uuids((device,) if shards is None else shards.group.devices),
    )
    fixed = _fixed_runner(plan, model, stack, cache) if sizes.cache.num_spare else None
    return Pretrained(model, processor, stack, cache, info, make_product, padded, fixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes(Needs):
    """A process's dtypes and cache besides."""

    working_dtype: torch.dtype  # of activations, and of the weights until they are packed
    cache_dtype: torch.dtype
    cache: CacheShape  # of one slot

    @classmethod
    def of(
        cls,
        plan: LoadPlan,
        checkpoint: Checkpoint,
        config: Any,
        device: torch.device,
        shards: Shards | None,
    ) -> _Sizes:
        """Raises ModelLoadError where a CPU has no float16."""
        text = config.text_config
        dtype = dtype_of(plan, checkpoint, device)
        is_half_on_cpu = dtype == torch.float16 and device.type == "cpu"
        working_dtype = torch.float32 if is_half_on_cpu else dtype
        kept_dtype = cache_dtype(working_dtype, device)
        num_ranks = 1 if shards is None else shards.group.size
        num_processes = 1 if shards is None else shards.group.devices.count(device)
        num_spare = 0
        if plan.has_graphs or plan.exact_rows:
            most_rows = plan.exact_rows or CAPTURED_ROWS[-1]
            num_spare = spare_places(plan.max_context_length, most_rows)
        cache = CacheShape(
            num_layers=text.num_hidden_layers,
            num_slots=1,
            num_kv_heads=text.num_key_value_heads // num_ranks,
            capacity=plan.max_context_length,
            head_dim=text.hidden_size // text.num_attention_heads,
            num_spare=num_spare,
        )
        shape = shape_of(checkpoint.name, config.to_dict())
        num_shared = shape.num_shared_parameters
        num_held = checkpoint.num_parameters - num_shared + num_shared / num_ranks
        slot_bytes = cache.num_bytes(kept_dtype)
        work_bytes = shape.work_bytes(
            plan.max_context_length,
            bytes_each=working_dtype.itemsize,
            cache_each=kept_dtype.itemsize,
        )
        if plan.has_graphs:
            slot_bytes += graph_bytes(text.num_hidden_layers)
            work_bytes += CAPTURED_ROWS[-1] * text.vocab_size * torch.float32.itemsize
        return cls(
            name=checkpoint.name,
            device=device,
            dtype=dtype,
            working_dtype=working_dtype,
            cache_dtype=kept_dtype,
            cache=cache,
            weight_bytes=int(num_processes * num_held * working_dtype.itemsize),
            slot_bytes=slot_bytes,
            work_bytes=work_bytes,
            num_processes=num_processes,
        )


def _read_configuration(transformers: Any, checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Configuration and processor; raises ModelLoadError."""
    try:
        return (
            transformers.AutoConfig.from_pretrained(checkpoint.folder),
            transformers.AutoProcessor.from_pretrained(checkpoint.folder),
        )
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


def _read_weights(
    transformers: Any,
    checkpoint: Checkpoint,
    architecture: str,
    sizes: _Sizes,
    shards: Shards | None,
) -> Any:
    """transformers' model; raises ModelLoadError for weights that are damaged or missing."""
    loading_options = {} if shards is None else shards.loading_options()
    try:
        with _quiet(transformers):
            model, problems = getattr(transformers, architecture).from_pretrained(
                checkpoint.folder,
                dtype=sizes.working_dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
                **loading_options,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"{checkpoint.name}: its weights cannot be read: {error}") from error
    lacking = sorted(problems["missing_keys"]) + sorted(map(str, problems["mismatched_keys"]))
    if lacking:
        raise ModelLoadError(
            f"{checkpoint.name}: its weights do not fit its configuration; missing or of another "
            f"shape: {', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}"
        )
    return model


def _make_stack(
    model: Any, num_ids: int, make_linear: MakeLinear, shards: Shards | None
) -> DecoderStack:
    """The decoder layers, which take over the weights of transformers' modules."""
    if shards is not None:
        shards.unwrap(model)
    stack = DecoderStack(model.model.language_model, model.lm_head, num_ids, make_linear, shards)
    if shards is not None:
        shards.free_head(model)
    return stack


def _fixed_runner(
    plan: LoadPlan, model: Any, stack: DecoderStack, cache: KeyValueCache
) -> FixedRunner:
    text = model.config.text_config
    return FixedRunner(
        stack,
        cache,
        model.get_input_embeddings().weight,
        groups=text.num_attention_heads // text.num_key_value_heads,
        exact_rows=plan.exact_rows,
        capture=CudaGraphs(cache.device).capture if plan.has_graphs else None,
    )


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keeps transformers' progress bars off the terminal: progress has its own way out."""
    logging = transformers.utils.logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def tokenizer_hash(tokenizer: Any) -> bytes:
    """SHA-256 over the tokenizer's id map: equal for models that share ids, whatever
    ``vocab_size`` they declare."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
        digest.update(int(token_id).to_bytes(8, "little"))
    return digest.digest()


def num_token_ids(tokenizer: Any, vocab_size: int) -> int:
    """One more than the tokenizer's largest id: what logits are cut to."""
    count = 1 + max(tokenizer.get_vocab().values())
    if count > vocab_size:
        raise ModelLoadError(
            f"the tokenizer has {count} ids but the model only {vocab_size}: they are not of one "
            "checkpoint"
        )
    return int(count)


def end_token_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion: the generation configuration's, else the tokenizer's."""
    ids = generation_config.eos_token_id if generation_config is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
