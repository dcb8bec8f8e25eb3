"""The pieces of a step on a GPU: how many operations a layer launches, and what they give.

docs/performance.md has the numbers of operations; the GPU is a pretended one.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hippo.models.cached import CachedModel
from hippo.models.interface.base import SequenceRows, StepPlan
from hippo.models.loading._torchvision import ensure_torchvision
from hippo.models.products.group import RankGroup
from hippo.models.products.kernels import make_norm
from hippo.models.products.linear import aligned_rows, make_linear
from hippo.models.products.shards import Shards
from hippo.models.runners.decoder import DecoderStack
from tests.support.devices.pretend_cuda import PretendTensor, pretend_cuda
from tests.support.models.pairs import load
from tests.support.models.reference import prefill, prepare, user

LAYER = {  # operations of a layer in bfloat16, by the rows of each sequence
    (1,): 15,
    (1, 1, 1): 15,
    (4,): 22,
    (4, 4): 22,
    (1, 4): 29,
}


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch launches meanwhile; a view launches nothing."""

    num_launched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_launched += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def there(target_checkpoint: Path) -> Iterator[CachedModel]:
    """A model in bfloat16 on a GPU with FlashAttention."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: True)
        with pretend_cuda():
            yield load(target_checkpoint, device="cuda", dtype="bfloat16", num_slots=4)


@pytest.mark.parametrize("rows", LAYER)
def test_a_layer_launches_few_operations(there: CachedModel, rows: tuple[int, ...]) -> None:
    prompt = prepare(there, user("what is it?"))
    for slot in range(len(rows)):
        prefill(there, slot, prompt)
    plan = StepPlan(
        tuple(SequenceRows(slot, 0, tuple(range(5, 5 + count))) for slot, count in enumerate(rows))
    )
    counts = []
    for num_layers in (1, there.num_layers):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(DecoderStack, "num_layers", num_layers)
            with Operations() as operations:  # type: ignore[no-untyped-call]
                there.forward(plan)
        counts.append(operations.num_launched)
    of_layers = counts[1] - counts[0]
    assert of_layers == LAYER[rows] * (there.num_layers - 1)
    assert counts[0] - LAYER[rows] <= 12, "for the whole step"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_norms_are_transformers_within_the_dtypes_rounding(
    there: CachedModel, dtype: torch.dtype
) -> None:
    ensure_torchvision()
    qwen2: Any = importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    generator = torch.Generator().manual_seed(0)
    norm = qwen2.Qwen2RMSNorm(128, eps=1e-6).to(dtype).requires_grad_(False)
    norm.weight.data.copy_(torch.randn(128, generator=generator))
    x = torch.randn(9, 128, generator=generator).to(dtype) * 3
    with torch.no_grad():
        expected = norm(x)
        torch.testing.assert_close(make_norm(norm)(x), expected)
        found = make_norm(norm.to("cuda:0"))(x.to("cuda:0"))
    assert isinstance(found, PretendTensor)
    steps = torch.finfo(dtype).eps * expected.float().abs()  # rounded once instead of twice
    assert bool(((found.numbers.float() - expected.float()).abs() <= 1.5 * steps).all())


def test_a_head_has_a_multiple_of_64_rows(there: CachedModel) -> None:
    stack, num_ids = there._stack, there.info.num_token_ids
    hidden = torch.ones(2, there.embedding.shape[1], dtype=torch.bfloat16, device="cuda:0")
    num_rows = min(aligned_rows(num_ids), there.model.config.text_config.vocab_size)
    assert num_ids % 64 and stack._head(hidden).shape[1] == num_rows
    assert stack.logits(hidden).shape == (2, num_ids)


@pytest.mark.parametrize("num_ids", [64, 250, 1000])
def test_each_rank_has_a_multiple_of_64_rows_of_the_head(num_ids: int) -> None:
    columns: list[torch.Tensor] = []

    def concatenate(own: torch.Tensor) -> torch.Tensor:
        columns.append(own)
        return torch.cat([*columns, *[own] * (3 - len(columns))], 1)

    weight, x = torch.randn(num_ids, 8), torch.randn(2, 8)
    for rank in range(3):
        group = Mock(RankGroup, size=3, rank=rank, concatenate=concatenate)
        found = Shards(group).gathered(make_linear)(weight)(x)
    assert all(own.shape[1] % 64 == 0 for own in columns)
    torch.testing.assert_close(found, x @ weight.T)
