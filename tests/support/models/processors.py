"""Processors other than the one that runs the tests: torch's answers patched, or by switches of the
libraries that multiply, which count from the start of a process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hippo.models.products import linear

PROCESSORS = ("AVX2", "AVX2, no MKL", "ARM", "unknown")
"""Zen 3 and Haswell by torch's builds with and without MKL; Neoverse N1; no library at all."""

SWITCHES = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
}
"""With these environment variables an x86 process multiplies as on a processor without AVX-512."""


def has_fbgemm(processor: str) -> bool:
    return processor.startswith("AVX2")


def forget_trials() -> None:
    """Makes hippo.models.products.linear try each kind of product again."""
    linear.packing.cache_clear()
    linear._is_right.cache_clear()


@contextmanager
def running_on(processor: str) -> Iterator[pytest.MonkeyPatch]:
    """Lets torch's operators answer as on one of PROCESSORS; none has bfloat16 in oneDNN.
    Yields what undoes it, for further patches."""
    reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)

    def refuse(*_arguments: Any) -> torch.Tensor:
        raise RuntimeError("the library is not in this build")

    def reorder_narrow(weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if weight.dtype != torch.float32 or processor == "unknown" or reorder is None:
            raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support ...")
        packed: torch.Tensor = reorder(weight, *arguments)
        return packed

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
            patch.setattr(torch.ops.mkldnn, name, lambda: False, raising=False)
        patch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", reorder_narrow, raising=False)
        patch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
        if processor != "AVX2":
            patch.setattr(torch.ops.mkl, "_mkl_reorder_linear_weight", refuse, raising=False)
        if not has_fbgemm(processor):
            patch.delattr(torch, "fbgemm_pack_gemm_matrix_fp16", raising=False)
            patch.delattr(torch, "fbgemm_linear_fp16_weight_fp32_activation", raising=False)
        forget_trials()
        yield patch
    forget_trials()
