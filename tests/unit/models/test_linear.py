"""Products equal torch's whatever the form of their weight, and with a packed one a row's bits do
not depend on its company."""

from __future__ import annotations

import pytest
import torch

from hippo.models import linear
from hippo.models.linear import has_half_linear, make_half_linear, make_linear, padded_rows


@pytest.mark.parametrize("packs", ["by default", "by oneDNN", "not"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (2,), (5,), (16,), (200,), (2, 5), (1, 7, 3)])
def test_a_product_equals_torchs(
    rows: tuple[int, ...], has_bias: bool, packs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packs == "by oneDNN":
        monkeypatch.setattr(linear, "_has_fast_mkl", lambda: False)
    if packs == "not":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    bias = torch.randn(48, generator=generator) if has_bias else None
    product = make_linear(weight, bias)
    x = torch.randn(*rows, 64, generator=generator)
    for given in (x, torch.randn(*rows, 128, generator=generator)[..., ::2]):
        expected = torch.nn.functional.linear(given, weight, bias)
        torch.testing.assert_close(product(given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_a_block(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    product = make_linear(torch.randn(320, 640, generator=generator).to(dtype))
    x = torch.randn(16, 640, generator=generator).to(dtype)
    together = product(x)
    for num_rows in range(1, 16):
        assert torch.equal(product(x[:num_rows]), together[:num_rows])


@pytest.mark.skipif(not has_half_linear(), reason="this torch has no fbgemm")
def test_a_weight_kept_in_float16_multiplies_float32_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(*shape, generator=generator).half().float() for shape in ((48, 320), (48,))
    )
    x = torch.randn(16, 320, generator=generator)
    product = make_half_linear(weight, bias)
    together = product(x)
    torch.testing.assert_close(together, x @ weight.T + bias, rtol=1e-5, atol=1e-5)
    for num_rows in range(1, 16):
        assert torch.equal(product(x[:num_rows]), together[:num_rows])


def test_rows_are_padded_to_few_different_numbers() -> None:
    padded = [padded_rows(number) for number in range(1, 1000)]
    assert all(more >= rows for rows, more in enumerate(padded, 1))
    assert padded[:33] == list(range(1, 34))
    assert padded == sorted(padded)
    assert len(set(padded)) < 70
    assert max(more / rows for rows, more in enumerate(padded, 1)) < 1.5


def test_a_padded_number_of_rows_stays_as_it_is() -> None:
    assert all(padded_rows(padded_rows(number)) == padded_rows(number) for number in range(1, 999))
