"""Decides all that follows from a plan and a checkpoint's files, before anything is built."""

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hippo.catalog.shapes import shape_of
from hippo.catalog.sizes import MOST_AUTO_SLOTS, ModelShape, memory_of
from hippo.errors import ModelLoadError
from hippo.models.attention.cache import CacheShape, cache_dtype
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import MAX_GROUPED_ROWS, LoadPlan
from hippo.models.loading._torchvision import ensure_torchvision
from hippo.models.loading.memory import MemoryNeeds
from hippo.models.loading.placement import device_of, dtype_of
from hippo.models.loading.quantization import find_quantization, warn_of_rounding
from hippo.models.products.linear import (
    MakeLinear,
    has_half_linear,
    make_half_linear,
    make_linear,
    packs_weights,
    padded_rows,
)
from hippo.models.quantized.forms import Packed, WeightForm
from hippo.models.runners.captured import GRAPH_LAYER_BYTES, MOST_ROWS, most_graphs
from hippo.models.runners.fixed import spare_places

if TYPE_CHECKING:
    from hippo.models.products.shards import Shards

_log = logging.getLogger(__name__)

# transformers imports torchao if it is installed, which warns about kernels for other devices.
_NOISY = ("torchao", "torch.utils._pytree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A plan for one checkpoint and one rank, with all choices made but those that need the memory
    beside the loaded weights: the context length and the number of slots."""

    plan: LoadPlan
    checkpoint: Checkpoint
    model_class: Any  # a class of transformers
    config: Any  # transformers' configuration
    processor: Any
    shards: "Shards | None"
    device: torch.device
    devices: tuple[torch.device, ...]  # one for each rank
    form: WeightForm | None  # None: weights are plain
    dtype: torch.dtype  # as served
    working_dtype: torch.dtype  # activations have it, and weights until they are packed
    cache_dtype: torch.dtype
    shape: ModelShape
    context_limit: int  # most tokens of a sequence that the checkpoint allows

    @property
    def is_half_on_cpu(self) -> bool:
        """Whether weights are float16 and activations float32."""
        return self.working_dtype != self.dtype

    @property
    def _packs_weights(self) -> bool:
        return not self.is_half_on_cpu and packs_weights(self.device, self.dtype)

    @property
    def make_linear(self) -> MakeLinear:
        """Makes the matrix products."""
        return make_half_linear if self.is_half_on_cpu else make_linear

    @property
    def padded(self) -> Callable[[int], int]:
        """Maps a number of rows to the number of rows to run, padding included."""
        return padded_rows if self._packs_weights else int

    @property
    def _has_graphs(self) -> bool:
        """Whether there may be CUDA graphs: not of layers with states."""
        return self.plan.has_graphs and self.shape.states is None

    def slot_shape(self, context_length: int) -> CacheShape:
        """Returns the shape of one rank's cache for one sequence of ``context_length`` tokens."""
        plan, shape = self.plan, self.shape
        capacity, num_spare = plan.slot_tokens(context_length), 0
        if self._has_graphs or plan.exact_rows:
            num_spare = spare_places(capacity, plan.exact_rows or MAX_GROUPED_ROWS)
        return CacheShape(
            num_layers=shape.num_attending,
            num_slots=1,
            num_kv_heads=shape.num_kv_heads // len(self.devices),
            capacity=capacity,
            head_dim=shape.head_dim,
            num_spare=num_spare,
            states=shape.states,
        )

    def needs(self, context_length: int) -> MemoryNeeds:
        """Returns the memory that a process needs for sequences of ``context_length`` tokens."""
        plan, shape, form = self.plan, self.shape, self.form
        slot = self.slot_shape(context_length)
        bytes_each, num_processes = self.working_dtype.itemsize, self.devices.count(self.device)
        memory = memory_of(
            shape,
            num_tokens=context_length,
            num_slots=1,
            num_devices=len(self.devices),
            bytes_each=bytes_each,
            cache_each=self.cache_dtype.itemsize,
            packs_weights=self._packs_weights,
            vision_cache_bytes=plan.vision_cache_bytes,
            media_cache_bytes=plan.media_cache_bytes,
            max_pixels=plan.max_pixels,
        )
        in_words = ", in float32 till they are packed" if self.is_half_on_cpu else ""
        if form is not None:
            in_words += f" and {form.name}" if form.is_kept else f", dequantised from {form.name}"
        is_gpu = self.device.type == "cuda"
        return MemoryNeeds(
            name=self.checkpoint.name,
            context_length=context_length,
            slot_tokens=slot.capacity,
            device=self.device,
            dtype=self.dtype,
            form=in_words,
            num_processes=num_processes,
            weight_bytes=num_processes * memory.weights,
            slot_bytes=slot.num_bytes(self.cache_dtype),
            work_bytes=memory.work + self._extra_work_bytes(),
            packing_bytes=shape.packing_bytes(bytes_each),
            reserved_bytes=memory.earlier_media,
            # All ranks read at once.
            host_bytes=is_gpu * len(self.devices) * shape.host_bytes(bytes_each),
        )

    def _extra_work_bytes(self) -> int:
        """Returns the bytes that graphs take, and the copies of weights that products make."""
        plan, shape, bytes_each = self.plan, self.shape, self.working_dtype.itemsize
        total = 0
        if self._has_graphs and self.working_dtype != torch.float32:  # which has no FlashAttention
            num_graphs = 1 if plan.exact_rows else most_graphs(plan.num_slots or MOST_AUTO_SLOTS)
            num_ids = shape.num_head_parameters // shape.hidden_size
            total += num_graphs * shape.num_layers * GRAPH_LAYER_BYTES + 4 * MOST_ROWS * num_ids
        if self.form is not None and self.form.is_kept:
            # Products of many rows unpack a weight; a graph keeps the memory of its own, unless
            # the kernels for few rows run in it.
            num_copies = 1 + (self._has_graphs and not isinstance(self.form, Packed))
            total += num_copies * shape.mlp_width * shape.hidden_size * bytes_each
        if self.device.type == "cpu" and self.dtype.itemsize == 2:
            if not (has_half_linear() if self.is_half_on_cpu else self._packs_weights):
                total += shape.packing_bytes(4)  # a weight in float32
        return total


def resolve(
    plan: LoadPlan, checkpoint: Checkpoint, architecture: str, shards: "Shards | None"
) -> Resolved:
    """Reads the checkpoint's configuration and processor and makes all choices; raises
    ModelLoadError. ``architecture`` names the model's class in transformers."""
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
        processor = transformers.AutoProcessor.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ModelLoadError(
            f"{checkpoint.name}: its configuration, tokenizer or processor cannot be read: {error}"
        ) from error
    context_limit = limit_context(checkpoint.name, config.text_config, plan.max_context_length)
    device = device_of(plan, shards)
    form = find_quantization(plan, checkpoint, device)
    dtype = dtype_of(plan, checkpoint, device, form)
    is_half_on_cpu = dtype == torch.float16 and device.type == "cpu"
    working_dtype = torch.float32 if is_half_on_cpu else dtype
    warn_of_rounding(plan, checkpoint, form, working_dtype)
    shape = shape_of(checkpoint.name, config.to_dict())
    if form is None:
        shape = replace(shape, num_parameters=checkpoint.num_floats)
    else:
        bits = form.layer_bits(checkpoint, shape, working_dtype.itemsize)
        shape = replace(shape, layer_bits=bits)
    if plan.first_layers is not None:
        shape = shape.first_layers(plan.first_layers)
        _shorten(config.text_config, plan.first_layers)
    return Resolved(
        plan=plan,
        checkpoint=checkpoint,
        model_class=getattr(transformers, architecture),
        config=config,
        processor=processor,
        shards=shards,
        device=device,
        devices=(device,) if shards is None else shards.group.devices,
        form=form,
        dtype=dtype,
        working_dtype=working_dtype,
        cache_dtype=cache_dtype(working_dtype, device),
        shape=shape,
        context_limit=context_limit,
    )


def _shorten(text: Any, num_layers: int) -> None:
    """Changes a text model's configuration to one of its first layers."""
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]


def import_transformers() -> Any:
    """Returns transformers, imported without the warnings of packages that it imports."""
    # Nothing is compiled by torch; a package that prepares it when it is imported takes seconds.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    ensure_torchvision()
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    return importlib.import_module("transformers")  # its own hints are partial


def limit_context(name: str, text: Any, given: int | None) -> int:
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
