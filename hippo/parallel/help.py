"""What a model and its prefill helper tell each other, and the shapes of what they send.

model                                    helper
HelpWith ──────── pipe ──────────────►   knows chunks and tapped rows
hidden, rotary, added of chunk 0 ────►   runs its layers
... of chunk 1 ──────────────────────►
◄──────── hidden, keys and values, tapped queries of chunk 0, 1, ...
Abandon ───────── pipe ──────────────►   computes nothing more, and sends what is expected
"""

import math
from dataclasses import dataclass

import torch

from hippo.catalog.sizes import MOST_CHUNK_ROWS
from hippo.models.interface.plan import LoadPlan


@dataclass(frozen=True, slots=True)
class Setup:
    """What a helper's process is told once, when the model's context is known."""

    plan: LoadPlan  # of the helper's layers


@dataclass(frozen=True, slots=True)
class HelpWith:
    """Run a prompt's rows. The first ``num_reused`` rows are run first, and not sent back, because
    the model has their keys and values; the others in chunks of ``chunk_rows``."""

    number: int
    num_reused: int
    num_rows: int  # of the whole prompt
    chunk_rows: int
    num_added: int  # first layers behind which features are added
    num_tapped: int  # first layers whose queries are wanted
    tapped: tuple[tuple[int, ...], ...]  # by chunk: rows whose queries are wanted

    def bounds(self) -> list[tuple[int, int]]:
        """Returns the first row and the end of each chunk that is sent back."""
        firsts = range(self.num_reused, self.num_rows, self.chunk_rows)
        return [(first, min(first + self.chunk_rows, self.num_rows)) for first in firsts]

    def parts(self) -> list[tuple[int, int]]:
        """Returns the first row and the end of all that the helper runs."""
        return [(0, self.num_reused)] * bool(self.num_reused) + self.bounds()


@dataclass(frozen=True, slots=True)
class Abandon:
    """The model needs nothing more of the prompt ``number``."""

    number: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The dimensions of the helper's layers, equal in both processes."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of hidden states
    cache_dtype: torch.dtype


class ChunkBuffer:
    """Memory for what a helper computes of a chunk, of at most MOST_CHUNK_ROWS rows."""

    def __init__(self, shape: LayerShape, device: torch.device) -> None:
        self._shape = shape
        self._hidden = torch.empty(
            MOST_CHUNK_ROWS, shape.hidden_size, dtype=shape.dtype, device=device
        )
        sizes = (shape.num_layers, 2, shape.num_kv_heads, MOST_CHUNK_ROWS, shape.head_dim)
        self._cached = torch.empty(math.prod(sizes), dtype=shape.cache_dtype, device=device)
        self.hidden = self._hidden  # [rows, hidden_size]
        self.cached = self._cached  # [num_layers, 2, num_kv_heads, rows, head_dim]
        self.queries: torch.Tensor | None = None  # [num_tapped, tapped rows, num_heads, head_dim]

    def fit(self, num_rows: int, num_tapped: int, tapped_rows: int) -> None:
        """Makes the tensors as large as a chunk's."""
        shape = self._shape
        self.hidden = self._hidden[:num_rows]
        sizes = (shape.num_layers, 2, shape.num_kv_heads, num_rows, shape.head_dim)
        self.cached = self._cached[: math.prod(sizes)].view(sizes)
        self.queries = None
        if num_tapped and tapped_rows:
            self.queries = torch.empty(
                (num_tapped, tapped_rows, shape.num_heads, shape.head_dim),
                dtype=shape.cache_dtype,
                device=self._cached.device,
            )

    def tensors(self) -> list[torch.Tensor]:
        """Returns what is sent, in this order."""
        sent = [self.hidden, self.cached]
        return sent if self.queries is None else [*sent, self.queries]


class InputBuffer:
    """Memory for what a helper receives of a chunk."""

    def __init__(self, shape: LayerShape, device: torch.device) -> None:
        self._device, self._dtype = device, shape.dtype
        rows, width, half = MOST_CHUNK_ROWS, shape.hidden_size, shape.head_dim // 2
        self._hidden = torch.empty(rows, width, dtype=shape.dtype, device=device)
        self._rotary = torch.empty(rows, 1, half, dtype=torch.complex64, device=device)
        self.hidden, self.rotary = self._hidden, self._rotary
        self.added: torch.Tensor | None = None  # [num_added, rows, hidden_size]

    def fit(self, num_rows: int, num_added: int) -> None:
        """Makes the tensors as large as a chunk's."""
        self.hidden, self.rotary = self._hidden[:num_rows], self._rotary[:num_rows]
        self.added = None
        if num_added:
            sizes = (num_added, *self.hidden.shape)
            self.added = torch.empty(sizes, dtype=self._dtype, device=self._device)

    def tensors(self) -> list[torch.Tensor]:
        """Returns what is received, in this order."""
        received = [self.hidden, self.rotary]
        return received if self.added is None else [*received, self.added]
