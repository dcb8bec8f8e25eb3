"""A vision tower's products against the modules that they replace."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from hippo.models.families.vision import replace_products, widen_range
from hippo.models.products.linear import Linear, MakeLinear, make_half_linear, make_linear


class Tower(torch.nn.Module):
    """Cuts images into patches, and a linear layer behind it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch_embedding = torch.nn.Conv2d(3, 24, **options)
        self.product = torch.nn.Linear(24, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.to(self.patch_embedding.weight.dtype)
        out: torch.Tensor = self.product(self.patch_embedding(images).flatten(2).transpose(1, 2))
        return out


@torch.inference_mode()
@pytest.mark.parametrize("side", [28, 33])  # of the latter 5 pixels are left over
@pytest.mark.parametrize("kernel", [14, (7, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_the_convolution_s(
    side: int, kernel: int | tuple[int, int], *, bias: bool
) -> None:
    tower = Tower(kernel_size=kernel, stride=kernel, bias=bias, padding="valid")
    images = torch.randn(2, 3, side, side + 14)
    expected = tower(images)
    replace_products(tower, make_linear)
    assert not any(isinstance(each, torch.nn.Conv2d) for each in tower.modules())
    torch.testing.assert_close(tower(images), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("dtype", "make", "tolerance"),
    [(torch.bfloat16, make_linear, 2e-2), (torch.float32, make_half_linear, 2e-3)],
)
def test_patches_in_half_precision(dtype: torch.dtype, make: MakeLinear, tolerance: float) -> None:
    tower = Tower(kernel_size=14, stride=14).to(dtype)
    images = torch.randn(2, 3, 28, 42)
    expected = tower(images)
    replace_products(tower, make)
    found = tower(images)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
@pytest.mark.parametrize("options", [{"stride": 3}, {"stride": 4, "padding": 1}])
def test_a_convolution_of_another_kind_stays(options: dict[str, int]) -> None:
    tower = Tower(kernel_size=4, **options)
    images = torch.randn(1, 3, 12, 12)
    expected = tower(images)
    replace_products(tower, make_linear)
    assert isinstance(tower.patch_embedding, torch.nn.Conv2d)
    torch.testing.assert_close(tower(images), expected, rtol=1e-5, atol=1e-5)


def test_a_weight_is_freed_before_the_next_is_packed() -> None:
    tower = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    weights = [weakref.ref(product) for product in tower]
    num_alive = []

    def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        num_alive.append(sum(each() is not None for each in weights))
        return make_linear(weight.clone(), bias)

    replace_products(tower, make)
    assert num_alive == [3, 2, 1]


def test_a_tower_of_float16_computes_in_bfloat16_on_a_gpu() -> None:
    for device, stored, computed in (
        ("cuda", torch.float16, torch.bfloat16),
        ("cuda", torch.float32, torch.float32),
        ("cpu", torch.float16, torch.float16),
    ):
        tower = torch.nn.Linear(2, 2, dtype=stored)
        widen_range(tower, torch.device(device))
        assert tower.weight.dtype == computed
