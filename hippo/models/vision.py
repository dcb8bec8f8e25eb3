"""The products of a vision tower in the form that is fastest here."""

from __future__ import annotations

from typing import Any

import torch

from hippo.models.linear import Linear, MakeLinear


class _LinearModule(torch.nn.Module):
    """A product with a fixed weight as a module."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._linear = linear
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.to(self._dtype))


def speed_up_vision(visual: Any, make_linear: MakeLinear) -> None:
    """Replaces the products in a Qwen2.5-VL vision tower, in place.

    The patch embedding is a three-dimensional convolution whose stride equals its kernel: as the
    product of flattened patches with a matrix, which it is, it takes a small part of the time.
    """
    convolution = visual.patch_embed.proj
    with torch.inference_mode():
        visual.patch_embed = _LinearModule(
            make_linear(convolution.weight.flatten(1), convolution.bias), convolution.weight.dtype
        )
    replace_products(visual, make_linear)


def replace_products(module: Any, make_linear: MakeLinear) -> None:
    """Replaces every linear layer below ``module``, in place."""
    with torch.inference_mode():
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    linear = make_linear(child.weight, child.bias)
                    setattr(parent, name, _LinearModule(linear, child.weight.dtype))
