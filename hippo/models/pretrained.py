"""What loading a checkpoint has in common in all families: transformers' parts, stack and cache."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from hippo.errors import ModelLoadError
from hippo.models._torchvision import ensure_torchvision
from hippo.models.cache import CacheShape, KeyValueCache, cache_dtype
from hippo.models.checkpoint import Checkpoint, Progress
from hippo.models.decoder import DecoderStack, TransformersStack
from hippo.models.fused import FusedStack
from hippo.models.graphs import CudaGraphs
from hippo.models.linear import (
    MakeLinear,
    make_half_linear,
    make_linear,
)
from hippo.models.memory import MemoryPlan, check_fits, choose_slots, device_uuids, fitting_slots
from hippo.models.static import CAPTURED_ROWS, StaticSteps, graph_bytes, spare_places
from hippo.models.vocabulary import end_token_ids, num_token_ids, tokenizer_hash
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
    make_linear: MakeLinear | None  # None: modules stay as transformers wrote them
    static: StaticSteps | None = None  # forwards of fixed shape, where they are asked for


def load_pretrained(
    checkpoint: Checkpoint,
    architecture: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_slots: int | None,
    max_context_length: int,
    served_name: str,
    progress: Progress,
    is_fused: bool = True,
    shards: Shards | None = None,
    reserved_bytes: int = 0,
    budget_bytes: int | None = None,
    has_graphs: bool = False,
    exact_rows: int | None = None,
) -> Pretrained:
    """Loads a checkpoint as ``transformers.<architecture>``, whose text model is Qwen2-style.

    ``is_fused`` False runs transformers' modules as they are: slower, and the reference that the
    fused ones are tested against. ``shards``: this process is one of several ranks, and holds its
    part of the layers and the cache. See load_model for what is said of memory. ``has_graphs`` and
    ``exact_rows`` (hippo.models.static) are for one process on one device. Raises ModelLoadError.
    """
    assert shards is None or not (has_graphs or exact_rows), "ranks step in the ordinary way"
    ensure_torchvision()
    transformers: Any = importlib.import_module("transformers")  # its own hints are partial
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
        processor = transformers.AutoProcessor.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ModelLoadError(
            f"{checkpoint.name}: its configuration, tokenizer or processor cannot be read: {error}"
        ) from error
    text = config.text_config
    window: int = text.sliding_window if "sliding_attention" in text.layer_types else 0
    if 0 < window < max_context_length:
        raise ModelLoadError(
            f"{checkpoint.name}: its layers attend over a sliding window of {window} tokens, which "
            f"is not supported beyond it: set --max-context-length to at most {window}"
        )
    # On a CPU float16 is how weights are kept; activations, cache and arithmetic are float32.
    is_half = is_fused and dtype == torch.float16 and device.type == "cpu"
    working_dtype = torch.float32 if is_half else dtype
    num_ranks, num_processes, weight_share = 1, 1, 1.0
    loading_options: dict[str, Any] = {}
    if shards is not None:
        shards.check(checkpoint.name, text)
        num_ranks = shards.group.size
        num_processes = shards.group.devices.count(device)
        weight_share, _ = shards.memory_share(text, checkpoint.num_parameters)
        loading_options = shards.loading_options()
    plan = MemoryPlan(
        max_context_length=max_context_length,
        num_slots=num_slots,
        reserved_bytes=reserved_bytes,
        budget_bytes=budget_bytes,
    )
    num_spare = 0
    if has_graphs or exact_rows:
        num_spare = spare_places(max_context_length, exact_rows or CAPTURED_ROWS[-1])
    shape = CacheShape(
        num_layers=text.num_hidden_layers,
        num_slots=1,
        num_kv_heads=text.num_key_value_heads // num_ranks,
        capacity=max_context_length,
        head_dim=text.hidden_size // text.num_attention_heads,
        num_spare=num_spare,
    )
    dtypes = working_dtype, cache_dtype(working_dtype, device)
    slot_bytes = shape.num_bytes(dtypes[1])
    work_bytes = shape_of(checkpoint.name, config.to_dict()).work_bytes(
        max_context_length, bytes_each=dtypes[0].itemsize, cache_each=dtypes[1].itemsize
    )
    if has_graphs:
        slot_bytes += graph_bytes(text.num_hidden_layers)
        work_bytes += CAPTURED_ROWS[-1] * text.vocab_size * torch.float32.itemsize
    check_fits(
        checkpoint.name,
        plan,
        weight_bytes=int(weight_share * checkpoint.num_parameters * working_dtype.itemsize),
        slot_bytes=num_processes * slot_bytes,
        work_bytes=num_processes * work_bytes,
        device=device,
        dtype=dtype,
    )
    progress("loading", 0.1)
    try:
        with _quiet(transformers):
            model, problems = getattr(transformers, architecture).from_pretrained(
                checkpoint.folder,
                dtype=working_dtype,
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
    model.eval().requires_grad_(False).to(device)
    progress("loading", 0.7)
    tokenizer = processor.tokenizer
    num_ids = num_token_ids(tokenizer, text.vocab_size)
    text_model = model.model.language_model
    make: MakeLinear | None = None
    stack: DecoderStack
    if is_fused:
        make = make_half_linear if is_half else make_linear
        if shards is not None:
            shards.unwrap(model)
        stack = FusedStack(text_model, model.lm_head, num_ids, make, shards)
        if shards is not None:
            shards.free_head(model)
    else:
        stack = TransformersStack(text_model, model.lm_head, num_ids)
    num_fitting = fitting_slots(
        plan,
        slot_bytes=slot_bytes,
        work_bytes=work_bytes,
        device=device,
        num_processes=num_processes,
    )
    if shards is not None:
        num_fitting = shards.least(num_fitting)
    num_slots = choose_slots(
        checkpoint.name, plan, num_fitting, slot_bytes=slot_bytes, device=device
    )
    shape = replace(shape, num_slots=num_slots)
    info = ModelInfo(
        name=served_name,
        family=checkpoint.model_type,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        tokenizer_hash=tokenizer_hash(tokenizer),
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        num_token_ids=num_ids,
        end_token_ids=end_token_ids(model.generation_config, tokenizer),
        max_context_length=max_context_length,
        num_slots=num_slots,
        num_parameters=checkpoint.num_parameters,
        device_uuids=device_uuids((device,) if shards is None else shards.group.devices),
    )
    cache = KeyValueCache(shape, dtype=cache_dtype(working_dtype, device), device=device)
    static = None
    if has_graphs or exact_rows:
        static = StaticSteps(
            stack,
            cache,
            model.get_input_embeddings().weight,
            groups=text.num_attention_heads // text.num_key_value_heads,
            exact_rows=exact_rows,
            graphs=CudaGraphs(device) if has_graphs else None,
        )
    return Pretrained(model, processor, stack, cache, info, make, static)


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
