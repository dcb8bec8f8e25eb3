"""What rank 0 tells the others: plain values and a prompt through a pipe, its visual embeddings by
broadcast.

Every rank runs the same device work in the same order:

    rank 0                                     follower
    begin_prefill + visual  ───────────────►   makes the same prefill, runs nothing yet
    advance                 ───────────────►   runs its next layer group
    ...                                        ... (a tap's scores are averaged over ranks)
    drop                    ───────────────►   forgets it: a sequence was closed early
    copy rows               ───────────────►   copies the same rows, of its own heads
    forward                 ───────────────►   runs the same rows
    stop                    ───────────────►   leaves

The vision tower runs on rank 0 alone; what it gives is broadcast, pixels are not sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hippo.models.base import AttentionTap, Prompt, StepPlan


@dataclass(frozen=True, slots=True)
class BeginPrefill:
    """A prefill, known by ``number`` from here on, with what VideoLanguageModel.prefill takes.

    ``prompt`` is one ``without_pixels``. With ``visual``, a tensor of that shape and dtype follows
    by broadcast.
    """

    number: int
    slot: int
    prompt: Prompt
    visual: tuple[tuple[int, ...], torch.dtype] | None
    kept: torch.Tensor | None  # on the CPU
    tap: AttentionTap | None
    num_reused: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Run a prefill's next layer group."""

    number: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave a prefill before its end."""

    number: int


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Copy the first rows of a slot to another one."""

    source: int
    slot: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Feed rows."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the group and end."""


Command = BeginPrefill | Advance | Drop | CopyRows | Forward | Stop


def without_pixels(prompt: Prompt) -> Prompt:
    """The prompt with the places and grids (integers) of its extras; pixels and items stay with the
    vision tower."""
    extras = {
        name: tensor for name, tensor in prompt.extras.items() if not tensor.is_floating_point()
    }
    return replace(prompt, extras=extras, items=())
