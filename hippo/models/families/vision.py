"""Replaces a vision tower's products by hippo.models.products.linear's."""

from typing import Any, TypeGuard

import torch

from hippo.models.interface.transfer import to_device
from hippo.models.products.linear import Linear, MakeLinear, is_plain


class _LinearModule(torch.nn.Module):
    """A module that computes a product with a fixed weight."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._linear = linear
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.to(self._dtype))


class _PatchProduct(torch.nn.Module):
    """Computes a two-dimensional convolution whose stride equals its kernel, as a matrix product.

    ``[images, channels, height, width]`` becomes ``[images, features, rows, columns]``, with one
    place per patch; incomplete patches at the right and the bottom are ignored.
    """

    def __init__(self, convolution: torch.nn.Conv2d, make_linear: MakeLinear) -> None:
        super().__init__()
        self.weight = convolution.weight  # towers read its dtype
        self._height, self._width = convolution.kernel_size
        self._linear = make_linear(convolution.weight.flatten(1), convolution.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        num_images, _, height, width = images.shape
        rows, columns = height // self._height, width // self._width
        inside = images[..., : rows * self._height, : columns * self._width]
        patches = inside.reshape(num_images, -1, rows, self._height, columns, self._width)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(num_images * rows * columns, -1)
        features = self._linear(patches)
        return features.view(num_images, rows, columns, -1).permute(0, 3, 1, 2)


def widen_range(tower: torch.nn.Module, device: torch.device) -> None:
    """Makes a tower of float16 on a GPU compute in bfloat16: the sums of Qwen2.5-VL's last block
    are beyond float16's range for long prompts (vLLM clamps them). A CPU computes float16 weights
    in float32."""
    if device.type == "cuda" and next(tower.parameters()).dtype == torch.float16:
        tower.to(torch.bfloat16)


def speed_up_vision(visual: Any, make_linear: MakeLinear) -> None:
    """Replaces the products in a Qwen-VL vision tower, in place.

    The patch embedding is a three-dimensional convolution whose stride equals its kernel. The
    equivalent product of flattened patches with a matrix takes a small part of the time.
    """
    convolution = visual.patch_embed.proj
    with torch.inference_mode():
        visual.patch_embed = _LinearModule(
            make_linear(convolution.weight.flatten(1), convolution.bias), convolution.weight.dtype
        )
    replace_products(visual, make_linear)


def place_beside_first(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook that moves all tensor arguments to the device of the first one."""
    if not isinstance(args[0], torch.Tensor):
        return args
    device = args[0].device
    return tuple(to_device(x, device) if isinstance(x, torch.Tensor) else x for x in args)


def replace_products(module: Any, make_linear: MakeLinear) -> None:
    """Replaces every plain linear layer below ``module`` and every convolution that cuts an image
    into patches, in place. A weight is freed before the next one is packed."""
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if is_plain(child) or _cuts_patches(child)
    ]
    with torch.inference_mode():
        for parent, name in places:
            setattr(parent, name, _product_of(getattr(parent, name), make_linear))


def _product_of(module: Any, make_linear: MakeLinear) -> torch.nn.Module:
    if _cuts_patches(module):
        return _PatchProduct(module, make_linear)
    return _LinearModule(make_linear(module.weight, module.bias), module.weight.dtype)


def _cuts_patches(module: torch.nn.Module) -> TypeGuard[torch.nn.Conv2d]:
    return (
        isinstance(module, torch.nn.Conv2d)
        and module.stride == module.kernel_size
        and module.padding in ("valid", (0, 0))
        and module.dilation == (1, 1)
        and module.groups == 1
    )
