"""The forms of quantised weights in memory, and how transformers reads them. Layers run by the
package that quantised them (``WeightForm``), by hippo's kernels (``Packed``), or as plain layers
(``Dequantised``)."""

import importlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hippo.catalog.sizes import ModelShape
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.products.linear import is_quantized
from hippo.models.quantized import awq
from hippo.models.quantized.quantised_rows import decompress, has_no_product

_LAYERS = "model.language_model.layers."  # the text model's

# Matches the name of every other module: the vision tower, the projector and the head are never
# quantised at load.
_OUTSIDE_LAYERS = rf"(?!{re.escape(_LAYERS)}).*"

# Bits of a weight that is quantised at load, scales included. int8: a scale for each row of it is
# negligible. nf4: 64 weights share a scale of 8 bits, and 256 scales share a float32.
_BITS = {"int8": 8.0, "nf4": 4 + 8 / 64 + 32 / (64 * 256)}

_SKIP_LISTS = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """Weights whose layers run by the package that quantised them.

    ``settings`` are the checkpoint's ``quantization_config`` for transformers; None: a plain
    checkpoint is quantised at load. ``dtypes`` are the dtypes in which the products do not
    overflow or fail, the preferred one first (none: any dtype). ``rounds_by_rows``: in 16 bits the
    kernels for a few rows round more than the kernels for many.
    """

    name: str
    settings: dict[str, Any] | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    rounds_by_rows: bool = False

    is_kept: ClassVar[bool] = True  # whether weights stay quantised in memory
    unused_suffixes: ClassVar[tuple[str, ...]] = ()  # names of stored weights that no module takes

    def layer_bits(
        self, checkpoint: Checkpoint, shape: ModelShape, bytes_each: int
    ) -> float | None:
        """Returns ModelShape.layer_bits; ``bytes_each`` is the item size of plain weights."""
        if self.settings is None:
            return _BITS[self.name]
        others = shape.num_parameters - shape.num_shared_parameters
        floats = checkpoint.num_floats - others  # scales
        return 8 * (checkpoint.num_packed_bytes + floats * bytes_each) / shape.num_shared_parameters

    def loading_options(self, model_class: Any, config: Any, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the arguments of ``model_class.from_pretrained``; ``config`` is its
        configuration, whose ``quantization_config`` is replaced, and rows have ``dtype``."""
        if self.settings is None:
            make_config = {"int8": _int8_config, "nf4": _nf4_config}[self.name]
            return {"quantization_config": make_config(dtype)}
        if self.settings["quant_method"] == awq.QUANT_METHOD:
            awq.register()
        config.quantization_config = _with_current_names(self.settings, model_class, config)
        return {"config": config}

    def prepare_modules(self, model: Any, dtype: torch.dtype) -> None:
        """Casts plain weights to ``dtype`` and sets what the quantiser's modules leave open."""
        # Logs a warning for each product of rows that are not float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        for name, module in model.named_modules():
            if has_no_product(module):
                if not self._packs(name):
                    decompress([module], dtype)
                continue  # the kernels take scales as they are stored
            # transformers leaves plain weights beside quantised ones in their stored dtype.
            if type(module).__module__.startswith(("torch.", "transformers.models.")):
                for weight in module.parameters(recurse=False):
                    if weight.is_floating_point() and not is_quantized(weight):
                        weight.data = weight.data.to(dtype)
            # Else a checkpoint's own compute dtype would round the rows of another dtype.
            if hasattr(module, "compute_type_is_set"):
                module.compute_dtype = dtype
            # bitsandbytes' fused products on a CPU round rows and scales to bfloat16, and fail if
            # a weight's width is not a multiple of its block size.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False

    def _packs(self, module: str) -> bool:
        """Whether hippo's kernels run the module of this name."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(WeightForm):
    """Weights whose layers run by hippo.models.quantized.packed, in ``bits`` a weight."""

    bits: float

    # Symmetric integers have zero points of 0, which some checkpoints store.
    unused_suffixes: ClassVar[tuple[str, ...]] = (".weight_zero_point",)

    def layer_bits(self, checkpoint: Checkpoint, shape: ModelShape, bytes_each: int) -> float:
        """See WeightForm.layer_bits. A checkpoint may leave some layers in 16 bits."""
        if self.settings is None:
            return self.bits
        return max(self.bits, WeightForm.layer_bits(self, checkpoint, shape, bytes_each) or 0.0)

    def _packs(self, module: str) -> bool:
        return module.startswith(_LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dequantised(WeightForm):
    """Weights that are dequantised while they are read; the layers are plain."""

    is_kept: ClassVar[bool] = False

    def layer_bits(self, checkpoint: Checkpoint, shape: ModelShape, bytes_each: int) -> None:
        """See WeightForm.layer_bits."""


def _int8_config(_dtype: torch.dtype) -> Any:
    transformers: Any = importlib.import_module("transformers")
    torchao: Any = importlib.import_module("torchao.quantization")
    return transformers.TorchAoConfig(
        torchao.Int8WeightOnlyConfig(set_inductor_config=False),
        modules_to_not_convert=[_OUTSIDE_LAYERS],
    )


def _nf4_config(dtype: torch.dtype) -> Any:
    transformers: Any = importlib.import_module("transformers")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=[_OUTSIDE_LAYERS],
    )


def _with_current_names(settings: dict[str, Any], model_class: Any, config: Any) -> dict[str, Any]:
    """Returns the settings with today's names of the modules that stay as they are.

    Checkpoints of older versions of transformers name them as in their weight files, as ``visual``
    for ``model.visual``. transformers renames the weights, and these names for one method only.
    Older versions also took the last part of a module's name for the module.
    """
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    with torch.device("meta"):
        model = model_class(config)
    renamings = mapping.get_model_conversion_mapping(model)
    modules = [name for name, _ in model.named_modules()]
    current = {}
    for key in _SKIP_LISTS:
        if settings.get(key):
            names = [_renamed(name, renamings) for name in settings[key]]
            current[key] = [whole for name in names for whole in _whole_names(name, modules)]
    return settings | current


def _whole_names(name: str, modules: Iterable[str]) -> Sequence[str]:
    """Returns the modules whose name is ``name`` or ends with it; ``name`` itself if none does."""
    return [module for module in modules if f".{module}".endswith(f".{name}")] or [name]


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    """Renames a module; a name after ``re:`` is a regular expression of compressed-tensors."""
    prefix = "re:" if name.startswith("re:") else ""
    current = name.removeprefix(prefix) + "."  # renamings are written for names of weights
    for renaming in renamings:
        current, _ = renaming.rename_source_key(current)
    return prefix + current.removesuffix(".")
