"""Products equal torch's whatever the form of their weight, and with a packed one a row's bits do
not depend on its company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hippo.models import linear
from hippo.models.linear import (
    Form,
    form_of,
    has_half_linear,
    kept_bias,
    kept_weight,
    make_half_linear,
    make_in_form,
    make_linear,
    make_packed_linear,
    padded_rows,
)


@pytest.fixture
def fresh_processor() -> Iterator[None]:
    """What is known of the processor is asked anew, and forgotten afterwards."""
    linear._has_fast_mkl.cache_clear()
    yield
    linear._has_fast_mkl.cache_clear()


@pytest.mark.parametrize("form", ["packed", "transposed"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (2,), (5,), (16,), (200,), (2, 5), (1, 7, 3)])
def test_a_product_equals_torchs(rows: tuple[int, ...], has_bias: bool, form: Form) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    bias = torch.randn(48, generator=generator) if has_bias else None
    product = make_in_form(form, weight, bias)
    assert form_of(product) == form
    x = torch.randn(*rows, 64, generator=generator)
    for given in (x, torch.randn(*rows, 128, generator=generator)[..., ::2]):
        expected = torch.nn.functional.linear(given, weight, bias)
        torch.testing.assert_close(product(given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_a_block(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    product = make_packed_linear(torch.randn(320, 640, generator=generator).to(dtype))
    x = torch.randn(16, 640, generator=generator).to(dtype)
    together = product(x)
    for num_rows in range(1, 16):
        assert torch.equal(product(x[:num_rows]), together[:num_rows])


def test_only_small_float32_weights_are_transposed_and_only_where_mkl_is_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = torch.randn(724, 724), torch.randn(725, 725)
    for has_fast_mkl, expected in ((True, "transposed"), (False, "packed")):
        monkeypatch.setattr(linear, "_has_fast_mkl", lambda known=has_fast_mkl: known)
        assert form_of(make_linear(small)) == expected
        assert form_of(make_linear(large)) == "packed"
        assert form_of(make_linear(small.bfloat16())) == "packed"
        assert form_of(make_packed_linear(small)) == "packed"


@pytest.mark.parametrize(
    ("vendor", "has_mkl", "expected"),
    [
        ("GenuineIntel", True, True),
        ("GenuineIntel", False, False),
        ("AuthenticAMD", True, False),
        (None, True, False),
    ],
)
@pytest.mark.usefixtures("fresh_processor")
def test_mkl_is_fast_on_intels_processors(
    monkeypatch: pytest.MonkeyPatch, vendor: str | None, has_mkl: bool, expected: bool
) -> None:
    def read_text(_path: Path, **_options: str) -> str:
        if vendor is None:
            raise FileNotFoundError
        return f"processor\t: 0\nvendor_id\t: {vendor}\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    assert linear._has_fast_mkl() == expected


def test_a_transposed_weight_is_the_products_own() -> None:
    for weight in (torch.randn(6, 4), torch.randn(4, 6).T, torch.randn(1, 4)):
        kept = kept_weight(make_in_form("transposed", weight))
        assert torch.equal(kept, weight.T)
        assert kept.is_contiguous()
        assert kept.data_ptr() != weight.data_ptr()


def test_a_plain_product_has_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_has_fast_mkl", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    product = make_linear(torch.randn(4, 4))
    for question in (form_of, kept_weight, kept_bias):
        with pytest.raises(TypeError, match="form of their own"):
            question(product)
    with pytest.raises(TypeError, match="no bias"):
        kept_bias(make_in_form("transposed", torch.randn(4, 4)))


@pytest.mark.skipif(not has_half_linear(), reason="this torch has no fbgemm")
def test_a_weight_kept_in_float16_multiplies_float32_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(*shape, generator=generator).half().float() for shape in ((48, 320), (48,))
    )
    x = torch.randn(16, 320, generator=generator)
    product = make_half_linear(weight, bias)
    assert form_of(product) == "half"
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
