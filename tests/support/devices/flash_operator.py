"""torch's FlashAttention operator on a CPU, for tests of what a GPU does: the same arguments,
requirements and results as ``mha_fwd`` and ``mha_varlen_fwd`` of torch's flash_api.cpp."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@contextlib.contextmanager
def flash_operator() -> Iterator[None]:
    library: Any = importlib.import_module("torch.library").Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", flash_attention_forward, "CPU")
        yield
    finally:
        library._destroy()


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    seqused_k: torch.Tensor | None = None,
    **others: Any,
) -> Result:
    """See torch/_meta_registrations.py, meta__flash_attention_forward."""
    assert not any(each is not None for each in others.values()), others
    assert dropout_p == 0.0 and not return_debug_mask and scale is not None
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert key.shape == value.shape
    assert query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    assert query.shape[-2] % key.shape[-2] == 0
    if cum_seq_q is None:
        assert cum_seq_k is None and query.dim() == 4 and query.shape[0] == key.shape[0] == 1
        output, sums = _attend(query[0], key[0], value[0], is_causal, scale)
        return _result(output[None], sums[None])
    assert cum_seq_k is not None and query.dim() == key.dim() == 3
    num_sequences = cum_seq_q.shape[0] - 1
    for each in (cum_seq_q, cum_seq_k):
        assert each.dtype == torch.int32 and each.is_contiguous()
        assert each.shape == (num_sequences + 1,)
    if seqused_k is not None:
        assert seqused_k.dtype == torch.int32 and seqused_k.is_contiguous()
        assert seqused_k.shape == (num_sequences,)
    bounds: list[int] = cum_seq_q.tolist()
    starts: list[int] = cum_seq_k.tolist()
    if max_q == 1 and query.shape[1] > key.shape[1]:  # bounds are not read
        assert query.shape[0] == num_sequences
        bounds = list(range(num_sequences + 1))
    output = torch.full(query.shape, torch.nan, dtype=query.dtype)
    sums = torch.full((query.shape[1], query.shape[0]), torch.nan)
    for index in range(num_sequences):
        rows = slice(bounds[index], bounds[index + 1])
        length = starts[index + 1] - starts[index] if seqused_k is None else int(seqused_k[index])
        assert rows.stop - rows.start <= max_q and 0 <= length <= max_k
        assert 0 <= starts[index] <= key.shape[0] - length
        seen = slice(starts[index], starts[index] + length)
        output[rows], sums[:, rows] = _attend(
            query[rows], key[seen], value[seen], is_causal and max_q > 1, scale
        )
    return _result(output, sums)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``[rows, heads, dim]``, and ``[heads, rows]`` of float32."""
    rows, tokens, groups = query.shape[0], key.shape[0], query.shape[1] // key.shape[1]
    if not tokens:
        return torch.zeros_like(query), torch.full((query.shape[1], rows), torch.inf)
    mask = None
    if is_causal:  # aligned at the bottom right
        hidden = torch.ones(rows, tokens, dtype=torch.bool).triu(tokens - rows + 1)
        mask = torch.zeros(rows, tokens, dtype=query.dtype).masked_fill(hidden, -torch.inf)
    by_head = [query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)]
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(each.transpose(0, 1)[None] for each in by_head), attn_mask=mask, scale=scale
    )
    return output[0].transpose(0, 1), sums[0].float()


def _result(output: torch.Tensor, sums: torch.Tensor) -> Result:
    return output, sums, torch.empty(0), torch.empty(0), torch.empty(0)
