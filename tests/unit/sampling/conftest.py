"""The devices that sampling is tested on."""

import pytest
import torch


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Every device at hand."""
    return str(request.param)
