"""Layers of AWQ checkpoints, as Qwen publishes them: AutoAWQ's form "gemm".

transformers runs these layers by gptqmodel, which has to be compiled for the GPU at hand. Here they
only hold what the checkpoint stores: hippo.models.quantized.packed multiplies it on a GPU, and
elsewhere ``decompress`` makes plain layers of it.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch

QUANT_METHOD = "hippo-awq"  # the name by which transformers finds the classes of ``register``

# AutoAWQ's order of the eight columns in an int32, from the lowest four bits on.
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class AwqLayer(torch.nn.Linear):
    """A linear layer as AWQ stores it; it cannot be called before ``decompress``.

    ``qweight`` is int32 ``[in, out / 8]``, eight numbers of 4 bits each. A group of columns
    shares ``scales``, float16 ``[groups, out]``, and ``qzeros``, int32 ``[groups, out / 8]``. A
    weight is ``(number - zero) * scale``.
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def __init__(self, like: torch.nn.Linear, group_size: int) -> None:
        """``like`` has the layer's sizes; a ``group_size`` of -1 stands for all columns."""
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        height, width = self.out_features, self.in_features
        num_groups = 1 if group_size == -1 else width // group_size
        self.register_buffer("qweight", torch.empty(width, height // 8, dtype=torch.int32))
        self.register_buffer("qzeros", torch.empty(num_groups, height // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.empty(num_groups, height, dtype=torch.float16))
        self.register_parameter("weight", None)
        self.register_parameter("bias", like.bias)

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns numbers ``[out, in]`` and zeros ``[out, groups]``, both uint8, and scales
        ``[out, groups]``."""
        numbers, zeros = _unpacked(self.qweight), _unpacked(self.qzeros)
        return numbers.T.contiguous(), zeros.T.contiguous(), self.scales.T.contiguous()

    def decompress(self, dtype: torch.dtype) -> None:
        """Makes this torch's linear layer, with a plain weight of ``dtype``."""
        numbers, zeros, scales = self.numbers()
        groups = numbers.view(self.out_features, zeros.shape[1], -1).float()
        weight = (groups - zeros[:, :, None]) * scales[:, :, None]
        self.drop_numbers()
        self.weight = torch.nn.Parameter(weight.flatten(1).to(dtype), requires_grad=False)
        if self.bias is not None:
            self.bias.data = self.bias.data.to(dtype)
        self.__class__ = torch.nn.Linear  # type: ignore[assignment]

    def drop_numbers(self) -> None:
        """Frees what the checkpoint stores."""
        del self.qweight, self.qzeros, self.scales


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of int32 ``[rows, n]`` as uint8 ``[rows, 8 * n]``."""
    halves = packed.contiguous().view(torch.uint8).view(*packed.shape, 4)
    by_bits = torch.stack((halves & 15, halves >> 4), -1).flatten(-2)  # from the lowest bits on
    numbers = torch.empty_like(by_bits)
    numbers[..., _ORDER] = by_bits
    return numbers.flatten(-2)


def problem_of(settings: Mapping[str, Any], widths: tuple[int, ...]) -> str | None:
    """Returns why a checkpoint with such a ``quantization_config`` and layers of so many columns
    cannot be read; None: it can."""
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if form != "gemm":
        return f"its AWQ weights are in the form {form!r}; supported is 'gemm'"
    if settings.get("bits", 4) != 4 or not settings.get("zero_point", True):
        return "its AWQ weights are not in 4 bits with zero points, which are the supported ones"
    size = int(settings.get("group_size", 128))
    if size != -1 and (size < 1 or any(width % size for width in widths)):
        return f"its AWQ groups of {size} columns do not divide its layers evenly"
    return None


@functools.cache
def register() -> None:
    """Makes transformers read checkpoints of ``QUANT_METHOD`` into layers of this module."""
    auto: Any = importlib.import_module("transformers.quantizers.auto")
    base: Any = importlib.import_module("transformers.quantizers.base")
    utils: Any = importlib.import_module("transformers.quantizers.quantizers_utils")
    settings: Any = importlib.import_module("transformers.utils.quantization_config")

    @auto.register_quantization_config(QUANT_METHOD)
    class AwqSettings(settings.QuantizationConfigMixin):  # type: ignore[misc]
        def __init__(self, group_size: int = 128, **others: Any) -> None:
            self.quant_method = QUANT_METHOD
            self.group_size = group_size
            self.modules_to_not_convert = others.get("modules_to_not_convert")

    @auto.register_quantizer(QUANT_METHOD)
    class AwqReader(base.HfQuantizer):  # type: ignore[misc]
        requires_calibration = True
        is_trainable = False

        def is_serializable(self) -> bool:
            return False

        def _process_model_before_weight_loading(self, model: Any, **_options: Any) -> None:
            skipped = self.get_modules_to_not_convert(
                model, self.quantization_config.modules_to_not_convert, add_default_skips=True
            )
            for name, module in list(model.named_modules()):
                if isinstance(module, torch.nn.Linear) and utils.should_convert_module(
                    name, skipped
                ):
                    with torch.device("meta"):
                        layer = AwqLayer(module, self.quantization_config.group_size)
                    model.set_submodule(name, layer)
