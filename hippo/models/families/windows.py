"""Attention of a vision tower within windows or frames: one call for all windows of one size.

Without flash-attn, transformers calls attention for each window: about 250 calls per layer for a
stretch of a video, each with a few launches, which takes a GPU several times as long as the
arithmetic. Windows differ in size only at the right and the bottom of a frame.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from hippo.models.interface.transfer import to_device

WINDOWS_NAME = "hippo_flash_windows"
"""transformers passes all windows in one call to an attention with "flash" in its name."""

Plan = Sequence[tuple[int, torch.Tensor | None]]
"""Window sizes, each with the rows of all windows of that size (int64; None: all rows)."""


def register_windows() -> None:
    """Registers ``WINDOWS_NAME`` with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(WINDOWS_NAME, attend_in_windows)


def attend_in_windows(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Attends within windows: ``[1, heads, rows, head_dim]`` to ``[1, rows, heads, head_dim]``.

    transformers' attentions have this signature. ``cu_seq_lens_q`` (int ``[windows + 1]`` on
    the host) holds the first row of each window and the end of the last one; None: one window.
    """
    assert attention_mask is None, "windows take the place of a mask"
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [rows, heads, head_dim]
    plan: Plan = [(query.shape[2], None)]
    if cu_seq_lens_q is not None:
        plan = _plan_of(cu_seq_lens_q, query.device)
    output: torch.Tensor | None = None
    for size, places in plan:
        given = rows if places is None else [x.index_select(0, places) for x in rows]
        q, k, v = (x.view(-1, size, *x.shape[1:]).transpose(1, 2) for x in given)
        found = scaled_dot_product_attention(q, k, v, scale=scaling)  # [windows, heads, size, ...]
        found = found.transpose(1, 2).flatten(0, 1)
        if places is None:
            output = found
        else:
            output = rows[0].new_empty(rows[0].shape) if output is None else output
            output.index_copy_(0, places, found)
    assert output is not None, "there are windows"
    return output[None], None


def _plan_of(boundaries: torch.Tensor, device: torch.device) -> Plan:
    """Returns the plan of these windows; it is kept on the tensor, which all layers share."""
    known: Plan | None = getattr(boundaries, "_hippo_plan", None)
    if known is None:
        known = boundaries._hippo_plan = _plan(boundaries, device)  # type: ignore[attr-defined]
    return known


def _plan(boundaries: torch.Tensor, device: torch.device) -> Plan:
    sizes = boundaries.diff()
    distinct = sorted(set(sizes.tolist()))
    if len(distinct) == 1:
        return [(distinct[0], None)]
    starts, plan = boundaries[:-1], list[tuple[int, torch.Tensor | None]]()
    for size in distinct:
        if size:  # empty windows have no rows
            own = starts[sizes == size].long()
            places = (own[:, None] + torch.arange(size)).flatten()
            plan.append((size, to_device(places, device)))
    return plan
