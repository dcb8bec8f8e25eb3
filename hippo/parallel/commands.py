"""The commands that rank 0 sends to the followers through pipes.

Every rank runs the same device work in the same order:

    rank 0                                     follower
    begin_prefill + visual  ───────────────►   creates the same prefill, runs no layer yet
    advance                 ───────────────►   runs its next piece
    ...                                        ... (a tap's scores are averaged over ranks)
    drop                    ───────────────►   ends the prefill of a closed sequence
    call copy_rows          ───────────────►   copies the same rows of its own heads
    call forward            ───────────────►   runs the same rows
    stop                    ───────────────►   leaves

Only rank 0 runs the vision tower. It broadcasts the visual embeddings, and sends no pixels.
"""

from dataclasses import dataclass, replace

import torch

from hippo.models.interface.base import AttentionTap, Prompt, StepPlan
from hippo.parallel.help import HelpWith, Setup, Told


@dataclass(frozen=True, slots=True)
class BeginPrefill:
    """Begin a prefill with the arguments of VideoLanguageModel.prefill; ``number`` identifies it.

    ``prompt`` is a result of ``without_pixels``. If ``visual`` is set, rank 0 then broadcasts a
    tensor of this shape and dtype.
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
    """Run a prefill's next piece: a group of layers over a chunk of the prompt."""

    number: int


@dataclass(frozen=True, slots=True)
class Drop:
    """End a prefill early."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """Call VideoLanguageModel.copy_rows or forward with these arguments."""

    method: str
    arguments: tuple[int | StepPlan, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the process group and exit."""


RankCommand = BeginPrefill | Advance | Drop | Call | Stop
HelperCommand = Setup | HelpWith | Told | Stop
Command = RankCommand | HelperCommand


def without_pixels(prompt: Prompt) -> Prompt:
    """Returns the prompt without its items, for ranks that do not run the vision tower."""
    return replace(prompt, items=())
