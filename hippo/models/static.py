"""Forwards of fixed shape: a number of rows and a stretch of the cache out of few, whatever is fed.

    rows     r0 r1 r2 p  p  p  p  p        3 tokens to feed, filled up to 8 rows
    places    7  8  9 10 11 12 13 14       where their keys and values go, by index
    cache    |0 ...  9|10 ... 255|         all 256 are read; row k is masked beyond its own place

Padding comes last and is written after the sequence's end, where the next step overwrites it, so no
row ever sees it. What changes from step to step stands in buffers on the device, so a forward can
be captured as a CUDA graph (hippo.models.graphs) and played again. And a row's arithmetic does not
depend on how many rows were fed beside it, which is what ``exact`` is for: there the stretch is
that of each row's own place, one sequence is one forward, and the rows are always as many, so that
where a device's kernels treat every row of a product alike, a token's logits have the same bits
whether it was fed alone or in a block (docs/algorithms.md).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hippo.models.attention import SequenceStep, Step
from hippo.models.batch import MASK_ALIGNMENT, MAX_GROUPED_ROWS
from hippo.models.cache import KeyValueCache
from hippo.models.decoder import DecoderStack
from hippo.models.graphs import GraphMaker, Replay
from hippo.models.rows import PlacedRows

_log = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, MAX_GROUPED_ROWS)
_LEAST_STRETCH = 256  # tokens
_MAX_KEPT = 256  # shapes whose buffers, and graph, are kept
_TOLERANCE = 1e-3  # of the largest logit, between a graph and what it was captured from


@dataclass(frozen=True, slots=True)
class StaticShape:
    """What one set of buffers, and one graph, is for."""

    slot: int
    num_rows: int
    num_tokens: int  # of the cache, from the slot's first on


def spare_places(capacity: int, max_rows: int) -> int:
    """Places that a cache needs after ``capacity`` for stretches and padding to end in."""
    return -capacity % MASK_ALIGNMENT + max_rows


def stretch(index: int, capacity: int) -> int:
    """Tokens that are read for a row at cache index ``index``: at most a quarter too many from
    1,024 on, at most 255 before."""
    num_tokens = index + 1
    step = max(_LEAST_STRETCH, 1 << max(num_tokens.bit_length() - 3, 0))
    return min(-(-num_tokens // step) * step, capacity + -capacity % MASK_ALIGNMENT)


def split_rows(start: int, num_rows: int, *, max_rows: int, capacity: int) -> list[range]:
    """Cache indices of ``num_rows`` from ``start``, cut so that no piece has more than ``max_rows``
    or rows of two stretches."""
    pieces: list[range] = []
    end = start + num_rows
    while start < end:
        stop = min(end, start + max_rows, stretch(start, capacity))
        pieces.append(range(start, stop))
        start = stop
    return pieces


class StaticStep:
    """One shape's buffers, and the forward over them.

    ``fill`` says what is fed, ``run`` computes from what the buffers hold and nothing else: no
    number of the host's stands in it, so it may be captured.
    """

    def __init__(
        self,
        shape: StaticShape,
        stack: DecoderStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        *,
        groups: int,
        rotary: torch.Tensor,
    ) -> None:
        rows, tokens, device = shape.num_rows, shape.num_tokens, cache.device
        self._stack = stack
        self._embedding = embedding
        self._fed = torch.zeros(2, rows, dtype=torch.int64, device=device)  # ids, places
        self._rotary = rotary.new_zeros(rows, *rotary.shape[1:])
        self._columns = torch.arange(tokens, device=device)
        self._mask = torch.zeros(rows, groups, tokens, dtype=cache.dtype, device=device)
        keys, values = cache.seen(shape.slot, tokens)
        sequence = SequenceStep(
            first_row=0,
            num_rows=rows,
            written=cache.slot(shape.slot),
            keys=keys,
            values=values,
            mask=self._mask.view(rows * groups, tokens),
            is_causal=False,
            is_grouped=True,
            places=self._fed[1],
        )
        self._step = Step((sequence,), cache.dtype)

    def fill(self, start: int, token_ids: Sequence[int], rotary: torch.Tensor) -> None:
        """Tokens for cache indices ``start`` and on; the last one is fed again as padding."""
        rows = self._fed.shape[1]
        padding = rows - len(token_ids)
        ids = [*token_ids, *[token_ids[-1]] * padding]
        self._fed.copy_(torch.tensor([ids, range(start, start + rows)]), non_blocking=True)
        self._rotary[: len(token_ids)].copy_(rotary)

    def run(self) -> torch.Tensor:
        """Float32 ``[num_rows, num_token_ids]``."""
        hidden_from = self._columns > self._fed[1][:, None]
        self._mask.zero_().masked_fill_(hidden_from[:, None], -torch.inf)
        hidden = torch.embedding(self._embedding, self._fed[0])
        hidden = self._stack.run(hidden, self._rotary, self._step, 0, self._stack.num_layers)
        return self._stack.logits(hidden)


class StaticSteps:
    """Chooses the shape for what is fed, and keeps the buffers and graphs of those in use.

    ``exact_rows``: every forward has that many rows, as the module says; None: as many as fit
    best, and several sequences are left to the ordinary path. Without ``graphs`` nothing is
    captured. A graph that cannot be captured, or whose first replay gives anything else than what
    it was captured from, is the last one: from then on all steps run as they are.
    """

    def __init__(
        self,
        stack: DecoderStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        *,
        groups: int,
        exact_rows: int | None = None,
        graphs: GraphMaker | None = None,
    ) -> None:
        assert exact_rows is not None or graphs is not None, "nothing to be gained"
        assert (exact_rows or 1) <= MAX_GROUPED_ROWS
        self._stack = stack
        self._cache = cache
        self._embedding = embedding
        self._groups = groups
        self._exact_rows = exact_rows
        self._graphs = graphs
        self._steps: OrderedDict[StaticShape, tuple[StaticStep, Replay]] = OrderedDict()

    @property
    def is_exact(self) -> bool:
        """Whether every forward has as many rows."""
        return self._exact_rows is not None

    def covers(self, sequences: Sequence[PlacedRows]) -> bool:
        """Whether ``forward`` takes these."""
        if self._exact_rows is not None:
            return True
        if self._graphs is None:
            return False
        return len(sequences) == 1 and len(sequences[0].token_ids) <= ROW_BUCKETS[-1]

    def forward(self, sequences: Sequence[PlacedRows]) -> torch.Tensor:
        """Float32 logits ``[all rows, num_token_ids]``, valid until the next call."""
        outputs = []
        for rows in sequences:
            num_rows = len(rows.token_ids)
            if self._exact_rows is None:
                pieces = [range(rows.start, rows.start + num_rows)]
            else:
                pieces = split_rows(
                    rows.start,
                    num_rows,
                    max_rows=self._exact_rows,
                    capacity=self._cache.shape.capacity,
                )
            for piece in pieces:
                outputs.append(self._piece(rows, piece))
                if len(pieces) > 1 or len(sequences) > 1:
                    outputs[-1] = outputs[-1].clone()  # the next one may be written over it
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _piece(self, rows: PlacedRows, places: range) -> torch.Tensor:
        shape = StaticShape(
            rows.slot,
            self._exact_rows or next(size for size in ROW_BUCKETS if size >= len(places)),
            stretch(places[-1], self._cache.shape.capacity),
        )
        self._cache.define(shape.slot, places.start, shape.num_tokens + shape.num_rows)
        first = places.start - rows.start
        taken = slice(first, first + len(places))
        entry = self._steps.get(shape)
        if entry is None:
            entry = self._make(shape, places.start, rows.token_ids[taken], rows.rotary[taken])
            self._steps[shape] = entry
            if len(self._steps) > _MAX_KEPT:
                self._steps.popitem(last=False)
        else:
            self._steps.move_to_end(shape)
        step, replay = entry
        step.fill(places.start, rows.token_ids[taken], rows.rotary[taken])
        return replay()[: len(places)]

    def _make(
        self, shape: StaticShape, start: int, token_ids: Sequence[int], rotary: torch.Tensor
    ) -> tuple[StaticStep, Replay]:
        """The shape's buffers, and its graph if there are to be graphs."""
        step = StaticStep(
            shape,
            self._stack,
            self._cache,
            self._embedding,
            groups=self._groups,
            rotary=rotary,
        )
        if self._graphs is None:
            return step, step.run
        step.fill(start, token_ids, rotary)
        try:
            expected = step.run().clone()
            replay = self._graphs.capture(step.run)
            difference = float((replay() - expected).abs().max() / expected.abs().max())
        except RuntimeError as error:
            self._give_up(f"{shape} cannot be captured: {error}")
            return step, step.run
        if not difference <= _TOLERANCE:
            self._give_up(f"a replay of {shape} differs by {difference:.1e} of the largest logit")
            return step, step.run
        return step, replay

    def _give_up(self, reason: str) -> None:
        _log.warning("CUDA graphs are off from here on: %s", reason)
        self._graphs = None
        self._steps.clear()
