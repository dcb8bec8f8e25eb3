"""Memory that a model and its prefill helper share: a prompt's inputs, and a ring of chunks.

Two processes on one machine need no network. On GPUs the memory is pinned, so that copies run
beside the computations; NCCL would need streams and a watchdog of its own, and refuses two
processes on one GPU.
"""

import contextlib
import math
import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch

from hippo.catalog.sizes import GIB, MOST_CHUNK_ROWS, SCORED_ROWS
from hippo.errors import ModelLoadError
from hippo.models.loading.pretrained import Pretrained

_ALIGNMENT = 64  # bytes; of a processor's cache line


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The dimensions of the helper's layers, equal in both processes."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_added: int  # first layers behind which features are added, at most
    dtype: torch.dtype  # of hidden states
    cache_dtype: torch.dtype


def layer_shape(loaded: Pretrained, num_layers: int | None = None) -> LayerShape:
    """Returns the dimensions of the first layers of a loaded model; None: of all."""
    cache = loaded.cache
    num_layers = cache.shape.num_layers if num_layers is None else num_layers
    return LayerShape(
        num_layers=num_layers,
        hidden_size=loaded.shape.hidden_size,
        num_heads=loaded.shape.num_heads,
        num_kv_heads=cache.shape.num_kv_heads,
        head_dim=cache.shape.head_dim,
        num_added=min(loaded.shape.tower.feature_parts - 1, num_layers),
        dtype=loaded.model.get_input_embeddings().weight.dtype,
        cache_dtype=cache.dtype,
    )


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the helper needs of some rows."""

    hidden: torch.Tensor  # [rows, hidden_size]
    rotary: torch.Tensor  # complex64 [rows, 1, head_dim / 2]
    added: torch.Tensor  # [num_added, rows, hidden_size]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the helper has computed of some rows."""

    hidden: torch.Tensor  # [rows, hidden_size]
    cached: torch.Tensor  # [num_layers, 2, num_kv_heads, rows, head_dim]
    queries: torch.Tensor  # [num_tapped, tapped rows, num_heads, head_dim]


class HelpMemory:
    """One process's view of the memory file ``file``, which it makes as large as needed."""

    num_chunks = 4  # that may lie ready while the model is busy with another piece

    def __init__(self, shape: LayerShape, num_rows: int, file: int, device: torch.device) -> None:
        """``num_rows``: of the longest prompt; ``device``: of the process's layers."""
        self._shape, self.device = shape, device
        row, scored = shape.num_layers * shape.head_dim, min(MOST_CHUNK_ROWS, SCORED_ROWS)
        sizes = [
            (shape.dtype, num_rows * shape.hidden_size),
            (torch.complex64, num_rows * shape.head_dim // 2),
            (shape.dtype, shape.num_added * num_rows * shape.hidden_size),
        ]
        sizes += [
            (shape.dtype, MOST_CHUNK_ROWS * shape.hidden_size),
            (shape.cache_dtype, 2 * row * MOST_CHUNK_ROWS * shape.num_kv_heads),
            (shape.cache_dtype, row * scored * shape.num_heads),
        ] * self.num_chunks
        num_bytes = [-(-dtype.itemsize * size // _ALIGNMENT) * _ALIGNMENT for dtype, size in sizes]
        os.ftruncate(file, sum(num_bytes))  # pages that nobody has written take no memory
        whole = torch.frombuffer(mmap.mmap(file, sum(num_bytes)), dtype=torch.uint8)
        if device.type == "cuda":
            _pin(whole, device)
        parts = [
            part[: dtype.itemsize * size].view(dtype)
            for part, (dtype, size) in zip(torch.split(whole, num_bytes), sizes, strict=True)
        ]
        hidden, rotary, added = parts[:3]
        self._hidden = hidden.view(num_rows, shape.hidden_size)
        self._rotary = rotary.view(num_rows, 1, shape.head_dim // 2)
        self._added = added.view(shape.num_added, num_rows, shape.hidden_size)
        self._chunks = [parts[first : first + 3] for first in range(3, len(parts), 3)]

    def inputs(self, first: int, end: int, num_added: int) -> Inputs:
        """Returns the place of a prompt's rows ``first:end``."""
        rows = slice(first, end)
        return Inputs(self._hidden[rows], self._rotary[rows], self._added[:num_added, rows])

    def chunk(self, index: int, num_rows: int, num_tapped: int, tapped_rows: int) -> Chunk:
        """Returns the place of a prompt's chunk ``index``, where chunk ``index - num_chunks`` was
        before."""
        shape = self._shape
        hidden, cached, queries = self._chunks[index % self.num_chunks]
        sizes = (shape.num_layers, 2, shape.num_kv_heads, num_rows, shape.head_dim)
        tapped = (num_tapped, tapped_rows, shape.num_heads, shape.head_dim)
        return Chunk(
            hidden.view(-1, shape.hidden_size)[:num_rows],
            cached[: math.prod(sizes)].view(sizes),
            queries[: math.prod(tapped)].view(tapped),
        )


def _pin(memory: torch.Tensor, device: torch.device) -> None:
    """Pins memory for copies from and to ``device``; raises ModelLoadError."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # the next kernel would raise the error
        raise ModelLoadError(
            f"{memory.nbytes / GIB:.1f} GiB of the host's memory, which a prefill helper needs, "
            f"cannot be pinned (CUDA error {code}): lower --max-context-length"
        )
