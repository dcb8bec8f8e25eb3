"""Steps of one sequence through compiled layers (hippo.models.compiled_layer), on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from hippo.models.attention import Step, plan_sequence
from hippo.models.batch import MAX_GROUPED_ROWS
from hippo.models.cache import KeyValueCache
from hippo.models.checkpoint import Progress
from hippo.models.compiled_layer import Run, load_or_compile
from hippo.models.fused import FusedStack
from hippo.models.rows import PlacedRows

_log = logging.getLogger(__name__)

_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of the largest value after all layers
_CHECKED_ROWS = (1, 2, 7, MAX_GROUPED_ROWS)
_CHECKED_TOKENS = 40  # cached before the rows that are checked


class CompiledSteps:
    """Steps of one sequence with up to 32 rows, through compiled layers."""

    def __init__(
        self,
        stack: FusedStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        run_layer: Run,
    ) -> None:
        self._stack = stack
        self._cache = cache
        self._embedding = embedding
        self._run_layer = run_layer
        self._weights = [stack.layer_tensors(index) for index in range(stack.num_layers)]
        self._groups = stack.layer_shape.groups
        self._places = torch.arange(cache.shape.capacity, device=cache.device)

    def covers(self, sequences: Sequence[PlacedRows]) -> bool:
        """Whether ``forward`` takes these: a sequence alone, and not the last token of a slot, of
        which a view has strides that the code was not made for."""
        if len(sequences) != 1:
            return False
        rows, num_rows = sequences[0], len(sequences[0].token_ids)
        return num_rows <= MAX_GROUPED_ROWS and rows.start + num_rows < self._cache.shape.capacity

    def forward(self, rows: PlacedRows) -> torch.Tensor:
        """Float32 logits ``[num_rows, num_token_ids]``."""
        ids = torch.tensor(rows.token_ids, device=self._embedding.device)
        hidden = torch.embedding(self._embedding, ids)
        return self._stack.logits(self.run(hidden, rows.rotary, rows.slot, rows.start))

    def run(
        self, hidden: torch.Tensor, rotary: torch.Tensor, slot: int, start: int
    ) -> torch.Tensor:
        """All layers on ``hidden`` ``[num_rows, hidden_size]``, whose first row goes to cache index
        ``start``."""
        end = start + hidden.shape[0]
        given = [torch.view_as_real(rotary), self._places[start:end], self._mask(start, end)]
        for weights, seen in zip(self._weights, self._cache.stretch(slot, end), strict=True):
            (hidden,) = self._run_layer([hidden, seen, *given, *weights])
        return hidden

    def _mask(self, start: int, end: int) -> torch.Tensor:
        """Additive ``[rows * groups, end]``, of the rows from cache index ``start`` on."""
        num_rows, dtype = end - start, self._cache.dtype
        if num_rows == 1:  # it sees all
            return torch.zeros(self._groups, end, dtype=dtype)
        mask = torch.full((num_rows, end), -torch.inf, dtype=dtype)
        return mask.triu_(start + 1).repeat_interleave(self._groups, 0)


def compile_steps(
    stack: FusedStack,
    cache: KeyValueCache,
    embedding: torch.Tensor,
    folder: Path,
    progress: Progress,
    *,
    level_without: int = logging.WARNING,
) -> CompiledSteps | None:
    """Loads or makes the package and holds its results against the ordinary layers'.

    None, with a record of ``level_without``, when there is no C++ compiler or compiling fails, and
    with a warning when a result is another one. To be called before the cache is in use; the first
    slot is written and cleared.
    """
    try:
        progress("compiling", 0.0)
        run_layer = load_or_compile(stack, cache, folder)
        steps = CompiledSteps(stack, cache, embedding, run_layer)
        difference = _largest_difference(steps, stack, cache)
    except Exception as error:  # whatever a compiler may raise: all works without it
        first_line = str(error).strip().partition("\n")[0]
        _log.log(level_without, "steps are not compiled: %s: %s", type(error).__name__, first_line)
        _log.debug("the whole error", exc_info=True)
        return None
    if not difference <= _TOLERANCES[embedding.dtype]:
        _log.warning(
            "steps are not compiled: compiled layers differ from the ordinary ones by %.1e of the "
            "largest value",
            difference,
        )
        return None
    progress("compiling", 1.0)
    return steps


@torch.inference_mode()
def _largest_difference(steps: CompiledSteps, stack: FusedStack, cache: KeyValueCache) -> float:
    """Of compiled from ordinary layers, as a share of the largest value, over random rows."""
    generator = torch.Generator().manual_seed(0)
    shape, dtype = stack.layer_shape, stack.layer_tensors(0)[0].dtype
    num_cached = min(_CHECKED_TOKENS, cache.shape.capacity // 2)
    hidden_size = stack.layer_tensors(0)[0].shape[0]
    past = torch.randn(cache.stretch(0, num_cached)[0].shape, generator=generator)
    largest = 0.0
    for num_rows in _CHECKED_ROWS:
        if num_cached + num_rows >= cache.shape.capacity:
            break
        hidden = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
        angles = torch.rand(num_rows, 1, shape.head_dim // 2, generator=generator)
        rotary = torch.polar(torch.ones_like(angles), angles)
        for layer in cache.stretch(0, num_cached):
            layer.copy_(past)
        sequence = plan_sequence(
            cache, 0, first_row=0, start=num_cached, num_rows=num_rows, groups=shape.groups
        )
        plan = Step((sequence,), cache.dtype)
        expected = stack.run(hidden.clone(), rotary, plan, 0, stack.num_layers).float()
        actual = steps.run(hidden, rotary, 0, num_cached).float()
        difference = float((actual - expected).abs().max() / expected.abs().max())
        largest = difference if not difference <= largest else largest  # keeps what is no number
    cache.clear(0, 0, min(num_cached + MAX_GROUPED_ROWS, cache.shape.capacity))
    return largest
