"""What rank 0 tells the others: plain values through a pipe, a prompt's tensors by broadcast.

Every rank runs the same device work in the same order:

    rank 0                                     follower
    begin_prefill + tensors ───────────────►   makes the same prefill, runs nothing yet
    advance                 ───────────────►   runs its next layer group
    ...                                        ... (a tap's scores are averaged over ranks)
    drop                    ───────────────►   forgets it: a sequence was closed early
    copy rows               ───────────────►   copies the same rows, of its own heads
    forward                 ───────────────►   runs the same rows
    stop                    ───────────────►   leaves

The vision tower runs on rank 0 alone; what it gives is part of the broadcast, pixels are not.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from hippo.models.base import AttentionTap, Prompt, Scope, StepPlan
from hippo.parallel.group import RankGroup


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to come by broadcast."""

    shape: tuple[int, ...]
    dtype: str
    is_on_device: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), dtype, tensor.device.type != "cpu")

    def empty(self, device: torch.device) -> torch.Tensor:
        """Room for it on a rank whose device is ``device``."""
        dtype = getattr(torch, self.dtype)
        return torch.empty(self.shape, dtype=dtype, device=device if self.is_on_device else "cpu")


@dataclass(frozen=True, slots=True)
class BeginPrefill:
    """A prefill, known by ``number`` from here on; its tensors follow, in the order of ``specs``.

    ``values`` are the prompt's fields that are no tensors.
    """

    number: int
    slot: int
    values: dict[str, Any]
    specs: dict[str, TensorSpec]
    tap: tuple[int, Scope] | None
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


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """What VideoLanguageModel.prefill takes."""

    prompt: Prompt
    visual: torch.Tensor | None
    kept: torch.Tensor | None
    tap: AttentionTap | None
    num_reused: int = 0


_EXTRA = "extras."


def pack_prefill(
    number: int, slot: int, inputs: PrefillInputs
) -> tuple[BeginPrefill, list[torch.Tensor]]:
    """The command and the tensors to broadcast after it.

    Of the prompt's extras go places and grids (integers); pixels and items stay with the vision
    tower.
    """
    values: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for field in fields(Prompt):
        value = getattr(inputs.prompt, field.name)
        if isinstance(value, torch.Tensor):
            tensors[field.name] = value
        elif field.name not in ("extras", "items"):
            values[field.name] = value
    for name, tensor in inputs.prompt.extras.items():
        if not tensor.is_floating_point():
            tensors[_EXTRA + name] = tensor
    if inputs.visual is not None:
        tensors["visual"] = inputs.visual
    if inputs.kept is not None:
        tensors["kept"] = inputs.kept
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    tap = None if inputs.tap is None else (inputs.tap.num_layers, inputs.tap.scope)
    command = BeginPrefill(number, slot, values, specs, tap, inputs.num_reused)
    return command, list(tensors.values())


def receive_prefill(command: BeginPrefill, group: RankGroup) -> PrefillInputs:
    """The other side of ``pack_prefill``: takes part in the broadcasts."""
    values, extras = dict(command.values), dict[str, torch.Tensor]()
    outside: dict[str, torch.Tensor | None] = {"visual": None, "kept": None}
    for name, spec in command.specs.items():
        tensor = spec.empty(group.device)
        group.broadcast(tensor)
        if name in outside:
            outside[name] = tensor
        elif name.startswith(_EXTRA):
            extras[name.removeprefix(_EXTRA)] = tensor
        else:
            values[name] = tensor
    tap = None if command.tap is None else AttentionTap(*command.tap)
    return PrefillInputs(
        Prompt(**values, extras=extras),
        outside["visual"],
        outside["kept"],
        tap,
        command.num_reused,
    )
