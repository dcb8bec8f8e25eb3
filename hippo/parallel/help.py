"""What a model and its prefill helper tell each other, through the pipes of the helper's process.

    model                              helper
    HelpWith ────────────────────►     knows chunks and tapped rows
    FED ─────────────────────────►     runs its layers over chunk 0
    FED ─────────────────────────►     ... over chunk 1
    ◄─────────────────────── READY
    TAKEN ───────────────────────►     may write another chunk there
    ABANDONED ───────────────────►     leaves the prompt
    ◄──────────────────────── OVER

The tensors lie in memory that both share (hippo.parallel.help_memory).
"""

from dataclasses import dataclass
from enum import Enum

from hippo.models.interface.plan import LoadPlan


@dataclass(frozen=True, slots=True)
class Setup:
    """What a helper's process is told once, when the model's context is known."""

    plan: LoadPlan  # of the helper's layers
    num_rows: int  # of the longest prompt


@dataclass(frozen=True, slots=True)
class HelpWith:
    """Run a prompt's rows. The first ``num_reused`` rows are run first, and not given back, because
    the model has their keys and values; the others in chunks of ``chunk_rows``."""

    number: int
    num_reused: int
    num_rows: int  # of the whole prompt
    chunk_rows: int
    num_added: int  # first layers behind which features are added
    num_tapped: int  # first layers whose queries are wanted
    tapped: tuple[tuple[int, ...], ...]  # by chunk: rows whose queries are wanted

    def bounds(self) -> list[tuple[int, int]]:
        """Returns the first row and the end of each chunk that is given back."""
        firsts = range(self.num_reused, self.num_rows, self.chunk_rows)
        return [(first, min(first + self.chunk_rows, self.num_rows)) for first in firsts]

    def parts(self) -> list[tuple[int, int]]:
        """Returns the first row and the end of all that the helper runs."""
        return [(0, self.num_reused)] * bool(self.num_reused) + self.bounds()


class Step(Enum):
    """What is so of a prompt now."""

    FED = "the inputs of its next part are there"
    READY = "its next chunk can be copied"
    TAKEN = "its next chunk has been copied"
    ABANDONED = "the model needs nothing more of it"
    OVER = "the helper writes nothing more of it"


@dataclass(frozen=True, slots=True)
class Told:
    """What model and helper tell each other of the prompt ``number``."""

    number: int
    step: Step
