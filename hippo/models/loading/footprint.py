"""The sizes of one rank's part of a model in memory, derived before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hippo.catalog.shapes import shape_of
from hippo.catalog.sizes import MOST_AUTO_SLOTS, memory_of
from hippo.models.attention.cache import CacheShape, cache_dtype
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import MAX_GROUPED_ROWS, LoadPlan
from hippo.models.loading.memory import MemoryNeeds
from hippo.models.loading.placement import device_of, dtype_of
from hippo.models.products.linear import has_half_linear, packs_weights
from hippo.models.quantized.forms import Quantization
from hippo.models.runners.captured import GRAPH_LAYER_BYTES, MOST_ROWS, most_graphs
from hippo.models.runners.fixed import spare_places

if TYPE_CHECKING:
    from hippo.models.products.shards import Shards


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The dtypes of one rank's part of the model, and its sizes."""

    needs: MemoryNeeds
    devices: tuple[torch.device, ...]  # of all ranks
    working_dtype: torch.dtype  # of activations, and of the weights until they are packed
    cache_dtype: torch.dtype
    cache: CacheShape  # of one slot
    num_parameters: int
    frame_bytes: int  # of the longest prompt's frames, as the model sees them
    feature_bytes: int  # of the longest prompt's vision features

    @classmethod
    def of(
        cls,
        plan: LoadPlan,
        checkpoint: Checkpoint,
        config: Any,
        quantization: Quantization | None,
        shards: Shards | None,
        context_length: int,
    ) -> ModelSizes:
        """Derives sizes from the configuration, for sequences of ``context_length`` tokens.

        Raises ModelLoadError as dtype_of does.
        """
        device = device_of(plan, shards)
        devices = (device,) if shards is None else shards.group.devices
        dtype = dtype_of(plan, checkpoint, device, quantization)
        is_half_on_cpu = dtype == torch.float16 and device.type == "cpu"
        working_dtype = torch.float32 if is_half_on_cpu else dtype
        kept_dtype = cache_dtype(working_dtype, device)
        text = config.text_config
        cache = _slot_shape(plan, text, len(devices), plan.slot_tokens(context_length))
        slot_bytes = cache.num_bytes(kept_dtype)
        shape = shape_of(checkpoint.name, config.to_dict())
        bytes_each = working_dtype.itemsize
        packs = packs_weights(device, dtype) and not is_half_on_cpu
        memory = memory_of(
            shape,
            num_tokens=context_length,
            num_slots=1,
            num_devices=len(devices),
            bytes_each=bytes_each,
            cache_each=kept_dtype.itemsize,
            packs_weights=packs,
            vision_cache_bytes=plan.vision_cache_bytes,
            media_cache_bytes=plan.media_cache_bytes,
            max_pixels=plan.max_pixels,
        )
        work_bytes = memory.work
        if plan.has_graphs and working_dtype != torch.float32:  # which has no FlashAttention
            num_slots = plan.num_slots or MOST_AUTO_SLOTS
            num_graphs = 1 if plan.exact_rows else most_graphs(num_slots)
            work_bytes += num_graphs * text.num_hidden_layers * GRAPH_LAYER_BYTES
            work_bytes += MOST_ROWS * text.vocab_size * torch.float32.itemsize
        if quantization is not None and quantization.is_kept:
            # Products of many rows unpack a weight; a graph keeps the memory of its own, unless the
            # kernels for few rows run in it.
            largest = text.intermediate_size * text.hidden_size * bytes_each
            work_bytes += (1 + (plan.has_graphs and not quantization.is_packed)) * largest
        if device.type == "cpu" and dtype.itemsize == 2:
            if not (has_half_linear() if is_half_on_cpu else packs):
                work_bytes += shape.packing_bytes(torch.float32.itemsize)  # a weight in float32
        num_processes = devices.count(device)
        form = ", in float32 till they are packed" if is_half_on_cpu else ""
        weight_bytes = num_processes * memory.weights
        if quantization is not None:
            form += quantization.form
            weight_bytes = quantization.weight_bytes(checkpoint, shape, bytes_each)
            weight_bytes += shape.head_copy_bytes(
                num_devices=1, bytes_each=bytes_each, packs_weights=packs
            )
        needs = MemoryNeeds(
            name=checkpoint.name,
            context_length=context_length,
            slot_tokens=cache.capacity,
            device=device,
            dtype=dtype,
            form=form,
            weight_bytes=weight_bytes,
            slot_bytes=slot_bytes,
            work_bytes=work_bytes,
            packing_bytes=shape.packing_bytes(bytes_each),
            # All ranks read at once.
            host_bytes=len(devices) * shape.host_bytes(bytes_each) if device.type == "cuda" else 0,
            reserved_bytes=memory.earlier_media,
            num_processes=num_processes,
        )
        return cls(
            needs,
            devices,
            working_dtype,
            kept_dtype,
            cache,
            shape.num_parameters,
            shape.frame_bytes(context_length),
            shape.feature_bytes(context_length, bytes_each=bytes_each),
        )


def _slot_shape(plan: LoadPlan, text: Any, num_ranks: int, slot_tokens: int) -> CacheShape:
    """Returns the shape of one rank's cache for one slot of ``slot_tokens`` tokens."""
    num_spare = 0
    if plan.has_graphs or plan.exact_rows:
        num_spare = spare_places(slot_tokens, plan.exact_rows or MAX_GROUPED_ROWS)
    return CacheShape(
        num_layers=text.num_hidden_layers,
        num_slots=1,
        num_kv_heads=text.num_key_value_heads // num_ranks,
        capacity=slot_tokens,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        num_spare=num_spare,
    )
