"""Steps of one sequence through compiled layers (hippo.models.compiled_layer), on a CPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from hippo.models.attention import Step, plan_sequence
from hippo.models.batch import MAX_GROUPED_ROWS
from hippo.models.cache import KeyValueCache
from hippo.models.checkpoint import Progress
from hippo.models.compiled_layer import (
    LayerSpec,
    Run,
    check_compiler,
    load_layer,
    prepare_loading,
)
from hippo.models.compiled_packages import load_kept, make_package
from hippo.models.fused import FusedStack
from hippo.models.rows import PlacedRows

_log = logging.getLogger(__name__)

_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of the largest value after all layers
CHECKED_ROWS = (1, 2, 7, MAX_GROUPED_ROWS)
"""Numbers of rows for which compiled layers are held against the ordinary ones."""

_CHECKED_TOKENS = 40  # cached before the rows that are checked


class CompiledSteps:
    """Steps of one sequence with up to 32 rows, through compiled layers, once it has their code.

    ``folder`` keeps that.
    """

    def __init__(
        self, stack: FusedStack, cache: KeyValueCache, embedding: torch.Tensor, folder: Path
    ) -> None:
        self.spec = LayerSpec.of(stack, cache)
        self.folder = folder
        self._stack = stack
        self._cache = cache
        self._embedding = embedding
        self._run_layer: Run | None = None
        self._weights = [stack.layer_tensors(index) for index in range(stack.num_layers)]
        self._groups = stack.layer_shape.groups
        self._places = torch.arange(cache.shape.capacity, device=cache.device)

    @property
    def has_code(self) -> bool:
        """Whether the code of a layer is there; without it no step is covered."""
        return self._run_layer is not None

    def use(self, run_layer: Run) -> None:
        """From now on steps run through this code (device thread)."""
        self._run_layer = run_layer

    def covers(self, sequences: Sequence[PlacedRows]) -> bool:
        """Whether ``forward`` takes these: a sequence alone, and not the last token of a slot, of
        which a view has strides that the code was not made for."""
        if self._run_layer is None or len(sequences) != 1:
            return False
        rows, num_rows = sequences[0], len(sequences[0].token_ids)
        return num_rows <= MAX_GROUPED_ROWS and rows.start + num_rows < self._cache.shape.capacity

    def forward(self, rows: PlacedRows) -> torch.Tensor:
        """Float32 logits ``[num_rows, num_token_ids]``."""
        assert self._run_layer is not None
        ids = torch.tensor(rows.token_ids, device=self._embedding.device)
        hidden = torch.embedding(self._embedding, ids)
        hidden = self._run(self._run_layer, hidden, rows.rotary, rows.slot, rows.start)
        return self._stack.logits(hidden)

    @torch.inference_mode()
    def difference(self, run_layer: Run, num_rows: int) -> float:
        """Of this code's results from the ordinary layers' over random rows, hidden and cached, as
        a share of the largest value (device thread). Slot 0 is as before, whatever is raised."""
        generator = torch.Generator().manual_seed(num_rows)
        shape, dtype = self._stack.layer_shape, self._weights[0][0].dtype
        start = min(_CHECKED_TOKENS, self._cache.shape.capacity // 2)
        end = start + num_rows
        if end >= self._cache.shape.capacity:
            return 0.0
        before = [layer.clone() for layer in self._cache.stretch(0, end)]
        hidden = torch.randn(num_rows, self.spec.hidden_size, generator=generator).to(dtype)
        angles = torch.rand(num_rows, 1, shape.head_dim // 2, generator=generator)
        rotary = torch.polar(torch.ones_like(angles), angles)
        past = torch.randn(before[0].shape, generator=generator)
        sequence = plan_sequence(
            self._cache, 0, first_row=0, start=start, num_rows=num_rows, groups=shape.groups
        )
        plan, num_layers = Step((sequence,), self._cache.dtype), self._stack.num_layers
        results = []
        try:
            for run in (
                partial(self._stack.run, hidden.clone(), rotary, plan, 0, num_layers),
                partial(self._run, run_layer, hidden, rotary, 0, start),
            ):
                for layer in self._cache.stretch(0, end):
                    layer.copy_(past)
                output = run().float()
                written = [layer[:, :, start:].clone() for layer in self._cache.stretch(0, end)]
                results.append((output, torch.stack(written)))
        finally:
            for layer, held in zip(self._cache.stretch(0, end), before, strict=True):
                layer.copy_(held)
        shares = [
            (actual - expected).abs().max() / expected.abs().max()
            for expected, actual in zip(*results, strict=True)
        ]
        return float(torch.stack(shares).max())  # of which one that is no number is the largest

    def are_small(self, differences: Iterable[float]) -> bool:
        """Whether code with such differences may be used; if not, a warning says so."""
        worst = max(differences, key=lambda difference: (math.isnan(difference), difference))
        is_small = worst <= _TOLERANCES[self._embedding.dtype]
        if not is_small:
            _log.warning(
                "steps are not compiled: compiled layers differ from the ordinary ones by %.1e of "
                "the largest value",
                worst,
            )
        return is_small

    def _run(
        self, run_layer: Run, hidden: torch.Tensor, rotary: torch.Tensor, slot: int, start: int
    ) -> torch.Tensor:
        """All layers on ``hidden`` ``[num_rows, hidden_size]``, whose first row goes to cache index
        ``start``."""
        end = start + hidden.shape[0]
        given = [torch.view_as_real(rotary), self._places[start:end], self._mask(start, end)]
        for weights, seen in zip(self._weights, self._cache.stretch(slot, end), strict=True):
            (hidden,) = run_layer([hidden, seen, *given, *weights])
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
    waits_for_code: bool,
    level_without: int = logging.WARNING,
) -> CompiledSteps | None:
    """Compiled steps, whose code is loaded from ``folder`` and held against the ordinary layers.

    Code that is not there yet is made, or with ``waits_for_code`` False left to be made while the
    model serves. None, with a record of ``level_without``, when there is no C++ compiler or
    compiling fails, and with a warning when a result is another one.
    """
    try:
        steps = CompiledSteps(stack, cache, embedding, folder)
        run_layer = load_kept(steps.spec, folder)
        if run_layer is None:
            check_compiler()
            if not waits_for_code:
                prepare_loading()
                return steps
            progress("compiling", 0.0)
            _log.info("compiling a layer; this takes a while once, %s keeps it", folder)
            run_layer = load_layer(make_package(steps.spec, folder))
            progress("compiling", 1.0)
        differences = [steps.difference(run_layer, num_rows) for num_rows in CHECKED_ROWS]
    except Exception as error:  # whatever a compiler may raise: all works without it
        log_failure(error, level_without)
        return None
    if not steps.are_small(differences):
        return None
    steps.use(run_layer)
    return steps


def log_failure(error: Exception, level: int) -> None:
    """Says why there are no compiled steps."""
    first_line = str(error).strip().partition("\n")[0]
    _log.log(level, "steps are not compiled: %s: %s", type(error).__name__, first_line)
    _log.debug("the whole error", exc_info=error)
