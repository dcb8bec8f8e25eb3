"""FlashAttention's operator on a GPU, which torch includes.

A step has few rows and a long context. A kernel that takes a mask divides its work by heads and
rows only: with four key-value heads, four of a GPU's hundred processors would read all cached
tokens one after another. FlashAttention also divides the tokens, applies the causal mask aligned at
the bottom right without a mask tensor, and reads lengths from the device.
"""

import torch

from hippo.models.attention.cache import KeyValueCache

_operator = torch.ops.aten._flash_attention_forward.default


def why_no_flash(cache: KeyValueCache, groups: int) -> str | None:
    """Returns why the cache's device lacks the kernel for its heads, each with ``groups`` query
    heads; None: it has it. NVIDIA GPUs from Ampere on do, in bfloat16 and float16."""
    device, num_heads, head_dim = cache.device, cache.shape.num_kv_heads, cache.shape.head_dim
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, not {device}"
    if head_dim % 8:
        return f"it needs heads of a multiple of 8 numbers, not of {head_dim}"
    with torch.cuda.device(device):  # the query below is about the current device
        query = torch.empty(1, num_heads * groups, 2, head_dim, dtype=cache.dtype, device=device)
        key = torch.empty(1, num_heads, 4, head_dim, dtype=cache.dtype, device=device)
        parameters = torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, False, True)
        if torch.backends.cuda.can_use_flash_attention(parameters):
            return None
    if cache.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, not {str(cache.dtype).removeprefix('torch.')}"
    return f"{device} does not run it with heads of {head_dim} numbers (it needs Ampere or later)"


def attend_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Computes attention of the last cached tokens' rows, each over the tokens up to its own.

    ``query`` is ``[rows, num_kv_heads, groups, head_dim]``, ``key`` and ``value`` are
    ``[num_kv_heads, 1, tokens, head_dim]``; the result is ``[rows, num_heads * head_dim]``.
    """
    rows, tokens = query.shape[0], key.shape[2]
    key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
    heads = query.flatten(1, 2)[None]
    found = _operator(heads, key, value, None, None, rows, tokens, 0.0, True, False, scale=scaling)
    return found[0].reshape(rows, -1)  # type: ignore[no-any-return]


def attend_ranges(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bounds: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor | None = None,
    most_rows: int,
    most_tokens: int,
    is_causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of several sequences, each over its own range of tokens.

    ``query`` is ``[rows, num_heads, head_dim]``; sequence ``i`` has rows ``bounds[i]`` up to
    ``bounds[i + 1]``, at most ``most_rows``. ``key`` and ``value`` are ``[tokens, num_kv_heads,
    head_dim]`` with any strides of the first two dimensions; the sequence attends to ``lengths[i]``
    tokens from ``starts[i]`` on, at most ``most_tokens`` (without ``lengths``, up to
    ``starts[i + 1]``). The three are int32 on the device, ``bounds`` and ``starts`` with one number
    more than there are sequences. Returns the output, of the query's shape, and the logarithms of
    the scores' sums of exponentials (float32 ``[num_heads, rows]``; infinite where there are no
    tokens, with an output of 0).

    If every sequence has one row (``most_rows`` is 1), the kernel reads keys and values once for
    all query heads that share them, and divides the tokens among the GPU's processors; else it does
    neither (``seqlenq_ngroups_swapped`` in torch's ``mha_varlen_fwd``).
    """
    found = _operator(
        query,
        key,
        value,
        bounds,
        starts,
        most_rows,
        most_tokens,
        0.0,
        is_causal,
        False,
        scale=scaling,
        seqused_k=lengths,
    )
    return found[0], found[1]
