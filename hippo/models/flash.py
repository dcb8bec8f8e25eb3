"""One sequence's rows on a GPU through FlashAttention's kernel, which torch brings along.

Few rows behind a long context are a verification's whole attention. A kernel that takes a mask cuts
its work by heads and rows alone: with four key-value heads, four of a GPU's hundred processors
would walk through all cached tokens, one after another. This one cuts the tokens as well, and knows
the causal rule aligned at the bottom right, which is ours, without a mask.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def has_flash(
    device: torch.device, dtype: torch.dtype, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Whether the device has the kernel for such heads: an NVIDIA GPU from Ampere on, in bfloat16
    or float16."""
    if device.type != "cuda" or head_dim % 8:
        return False
    with torch.cuda.device(device):  # it is the current one that is asked
        query = torch.empty(1, num_heads, 2, head_dim, dtype=dtype, device=device)
        key = torch.empty(1, num_kv_heads, 4, head_dim, dtype=dtype, device=device)
        parameters = torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, False, True)
        return bool(torch.backends.cuda.can_use_flash_attention(parameters))


def attend_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Rows that are the last of the cached tokens, each seeing those up to its own.

    ``query`` is ``[rows, num_kv_heads, groups, head_dim]``, ``key`` and ``value`` are
    ``[num_kv_heads, 1, tokens, head_dim]``; gives ``[rows, num_heads * head_dim]``.
    """
    heads = query.flatten(1, 2).transpose(0, 1)[None]
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    if query.shape[0] == 1:  # it sees all
        output = scaled_dot_product_attention(heads, key, value, scale=scaling, enable_gqa=True)
    else:
        output = _kernel(heads, key, value, scaling)
    return output[0].transpose(0, 1).reshape(query.shape[0], -1)


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """``[1, num_heads, rows, head_dim]``, the causal rule aligned at the bottom right.

    torch's own way there (torch.nn.attention.bias.causal_lower_right) calls the same, but makes a
    mask on the host each time.
    """
    found: tuple[torch.Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal=True, scale=scaling
    )
    return found[0]
