"""Attention of one sequence's rows on a GPU by FlashAttention's kernel, which torch includes.

A verification has few rows and a long context. A kernel that takes a mask divides its work by heads
and rows only: with four key-value heads, four of a GPU's hundred processors would read all cached
tokens one after another. FlashAttention's kernel also divides the tokens, and applies the causal
mask aligned at the bottom right, which this project needs, without a mask tensor.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def has_flash(
    device: torch.device, dtype: torch.dtype, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Whether the device has the kernel for these heads: NVIDIA GPUs from Ampere on do, in bfloat16
    and float16."""
    if device.type != "cuda" or head_dim % 8:
        return False
    with torch.cuda.device(device):  # the query below is about the current device
        query = torch.empty(1, num_heads, 2, head_dim, dtype=dtype, device=device)
        key = torch.empty(1, num_kv_heads, 4, head_dim, dtype=dtype, device=device)
        parameters = torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, False, True)
        return bool(torch.backends.cuda.can_use_flash_attention(parameters))


def attend_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Computes attention of the last cached tokens' rows, each over the tokens up to its own.

    ``query`` is ``[rows, num_kv_heads, groups, head_dim]``, ``key`` and ``value`` are
    ``[num_kv_heads, 1, tokens, head_dim]``; the result is ``[rows, num_heads * head_dim]``.
    """
    heads = query.flatten(1, 2).transpose(0, 1)[None]
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    if query.shape[0] == 1:  # one row attends to all tokens
        output = scaled_dot_product_attention(heads, key, value, scale=scaling, enable_gqa=True)
    else:
        output = _kernel(heads, key, value, scaling)
    return output[0].transpose(0, 1).reshape(query.shape[0], -1)


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Returns ``[1, num_heads, rows, head_dim]`` under a causal mask aligned at the bottom right.

    torch.nn.attention.bias.causal_lower_right calls the same operator, but makes a mask on the host
    each time.
    """
    found: tuple[torch.Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal=True, scale=scaling
    )
    return found[0]
