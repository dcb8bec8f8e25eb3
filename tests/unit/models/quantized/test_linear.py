"""Products equal torch's whatever the processor packs."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from hippo.models.products.kernels import difference_of
from hippo.models.products.linear import (
    _make_by_mkl,
    _make_by_onednn,
    has_half_linear,
    make_half_linear,
    make_linear,
    packing,
    packs_weights,
    padded_rows,
)
from tests.support.models.processors import PROCESSORS, has_fbgemm, running_on


@pytest.fixture(params=["this one", *PROCESSORS])
def processor(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "this one":
        yield request.param
        return
    with running_on(request.param):
        yield request.param


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (5,), (16,), (200,), (1, 7, 3)])
def test_a_product_equals_torchs(rows: tuple[int, ...], has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 64).to(dtype)
    bias = torch.randn(48).to(dtype) if has_bias else None
    product = make_linear(weight, bias)
    for given in (torch.randn(*rows, 64).to(dtype), torch.randn(*rows, 128).to(dtype)[..., ::2]):
        found = product(given)
        expected = linear(given.float(), weight.float()) + (0 if bias is None else bias)
        assert found.dtype == dtype
        assert difference_of(found, expected, dtype) is None
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_weight_kept_in_float16_multiplies_float32_rows(has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, values = torch.randn(48, 320).half().float(), torch.randn(48).half().float()
    bias = values if has_bias else None
    product = make_half_linear(weight, bias)
    for rows in ((1,), (16,), (2, 5)):
        x = torch.randn(*rows, 320)
        torch.testing.assert_close(product(x), linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_what_a_processor_lacks_is_not_packed(processor: str) -> None:
    if processor == "this one":
        assert packing(torch.bfloat16) is None or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return
    cpu = torch.device("cpu")
    assert packs_weights(cpu, torch.float32) == (processor != "unknown")
    assert not packs_weights(cpu, torch.bfloat16)
    assert not packs_weights(cpu, torch.float16)
    assert has_half_linear() <= has_fbgemm(processor)
    assert not packs_weights(torch.device("cuda"), torch.float32)


def test_a_library_with_wrong_numbers_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    operators, reorder = torch.ops.mkldnn, torch.ops.mkldnn._reorder_linear_weight
    with running_on("AVX2, no MKL") as patch:
        patch.setattr(operators, "_reorder_linear_weight", lambda weight, n: reorder(-weight, n))
        assert packing(torch.float32) is None
    assert "are wrong here: a result differs by" in caplog.text


@pytest.mark.parametrize("is_alike", [True, False])
def test_mkl_multiplies_only_where_its_rows_do_not_depend_on_the_rows_beside_them(
    is_alike: bool,
) -> None:
    def multiply(x: torch.Tensor, packed: torch.Tensor, *_others: object) -> torch.Tensor:
        product = x.double() @ packed.double().T
        return (product if is_alike else product * (1 + x.shape[0] * 2**-20)).float()

    with running_on("AVX2") as patch:
        patch.setattr(torch.ops.mkl, "_mkl_reorder_linear_weight", lambda weight, _: weight)
        patch.setattr(torch.ops.mkl, "_mkl_linear", SimpleNamespace(default=multiply))
        make = packing(torch.float32)
    assert make is (_make_by_mkl if is_alike else _make_by_onednn)


def test_rows_are_padded_to_few_different_numbers() -> None:
    padded = [padded_rows(number) for number in range(1, 1000)]
    assert all(more >= rows for rows, more in enumerate(padded, 1))
    assert padded[:33] == list(range(1, 34))
    assert padded == sorted(padded)
    assert len(set(padded)) < 70
    assert max(more / rows for rows, more in enumerate(padded, 1)) < 1.5
