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

import itertools
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hippo.models.attention import AttentionPlan, SequencePart
from hippo.models.batch import MASK_ALIGNMENT
from hippo.models.cache import KeyValueCache
from hippo.models.decoder import DecoderStack
from hippo.models.graphs import Capture, Replay
from hippo.models.plan import MAX_GROUPED_ROWS
from hippo.models.rows import PlacedRows

_log = logging.getLogger(__name__)

_LEAST_STRETCH = 256  # tokens
_MAX_KEPT = 288  # shapes whose buffers, and graph, are kept: of 32 slots all that are captured
# What is captured, unless rows are exact. Of few sizes, so that there is room for every slot; and
# behind more tokens a kernel that takes a mask costs more than launches do (hippo.models.flash).
CAPTURED_ROWS = (1, 8, MAX_GROUPED_ROWS)
_CAPTURED_STRETCHES = (1024, 2048, 4096)
_GRAPH_LAYER_BYTES = 27 * (16 << 10)  # launches a layer, each of so many: reckoned, not measured
_TOLERANCE = 1e-3  # of the largest logit, between a graph and what it was captured from


@dataclass(frozen=True, slots=True)
class FixedShape:
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


def captured_stretch(index: int, capacity: int) -> int:
    """The same where graphs are captured for several numbers of rows; ``index`` is one of those
    that are."""
    num_tokens = next(size for size in _CAPTURED_STRETCHES if size > index)
    return min(num_tokens, capacity + -capacity % MASK_ALIGNMENT)


def graph_bytes(num_layers: int) -> int:
    """What the graphs of a slot take of the device, at most."""
    num_shapes = len(CAPTURED_ROWS) * len(_CAPTURED_STRETCHES)
    return num_shapes * num_layers * _GRAPH_LAYER_BYTES


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


class FixedForward:
    """One shape's buffers, and the forward over them.

    ``fill`` says what is fed, ``run`` computes from what the buffers hold and nothing else: no
    number of the host's stands in it, so it may be captured. ``logits`` (float32 ``[most rows,
    num_token_ids]``) is where all shapes leave theirs, so that graphs do not each keep some.
    """

    def __init__(
        self,
        shape: FixedShape,
        stack: DecoderStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        *,
        groups: int,
        rotary: torch.Tensor,
        logits: torch.Tensor | None = None,
    ) -> None:
        rows, tokens, device = shape.num_rows, shape.num_tokens, cache.device
        self._stack = stack
        self._embedding = embedding
        self._logits = None if logits is None else logits[:rows]
        self._fed = torch.zeros(2, rows, dtype=torch.int64, device=device)  # ids, places
        self._rotary = rotary.new_zeros(rows, *rotary.shape[1:])
        self._columns = torch.arange(tokens, device=device)
        self._mask = torch.zeros(rows, groups, tokens, dtype=cache.dtype, device=device)
        keys, values = cache.seen(shape.slot, tokens)
        sequence = SequencePart(
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
        self._step = AttentionPlan((sequence,), cache.dtype)

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
        logits = self._stack.logits(hidden)
        return logits if self._logits is None else self._logits.copy_(logits)


class FixedRunner:
    """Chooses the shape for what is fed, and keeps the buffers and graphs of those in use.

    ``exact_rows``: every forward has that many rows, as the module says; None: as many as fit
    best, and several sequences, long contexts and shapes for which there is no more room are left
    to the ordinary path. Without ``capture`` nothing is captured. A graph that cannot be captured,
    or whose first replay gives anything else than what it was captured from, is the last one: from
    then on all steps run as they are.
    """

    def __init__(
        self,
        stack: DecoderStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        *,
        groups: int,
        exact_rows: int | None = None,
        capture: Capture | None = None,
    ) -> None:
        assert exact_rows is not None or capture is not None, "nothing to be gained"
        assert (exact_rows or 1) <= MAX_GROUPED_ROWS
        self._stack = stack
        self._cache = cache
        self._embedding = embedding
        self._groups = groups
        self._exact_rows = exact_rows
        self._capture = capture
        self._steps: OrderedDict[FixedShape, tuple[FixedForward, Replay]] = OrderedDict()
        self._logits: torch.Tensor | None = None  # made with the first shape, which tells its width

    def covers(self, sequences: Sequence[PlacedRows]) -> bool:
        """Whether ``forward`` takes these."""
        if self._exact_rows is not None:
            return True
        if self._capture is None or len(sequences) != 1:
            return False
        (rows,) = sequences
        if rows.num_rows > CAPTURED_ROWS[-1] or rows.end > _CAPTURED_STRETCHES[-1]:
            return False
        shape = self._shape(rows.slot, range(rows.start, rows.end))
        return shape in self._steps or len(self._steps) < _MAX_KEPT

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

    def capture_all(self, rotary: torch.Tensor) -> Iterator[int]:
        """Captures what sequences may come to need, slot by slot, as far as there is room: no
        answer waits for it then. ``rotary`` as of PlacedRows, for any rows; gives how many there
        are after each one."""
        if self._exact_rows is not None:
            return
        cache = self._cache.shape
        ends = sorted({min(size, cache.capacity) for size in _CAPTURED_STRETCHES})
        for slot, end, rows in itertools.product(range(cache.num_slots), ends, CAPTURED_ROWS):
            placed = PlacedRows(slot, end - rows, (0,) * rows, rotary[:rows])
            if rows <= end and self.covers((placed,)):
                with torch.inference_mode():
                    self.forward((placed,))
                if self._capture is None:  # given up
                    return
                yield len(self._steps)

    def _shape(self, slot: int, places: range) -> FixedShape:
        """That in which rows are fed at these cache indices."""
        capacity = self._cache.shape.capacity
        if self._exact_rows is not None:
            return FixedShape(slot, self._exact_rows, stretch(places[-1], capacity))
        num_rows = next(size for size in CAPTURED_ROWS if size >= len(places))
        return FixedShape(slot, num_rows, captured_stretch(places[-1], capacity))

    def _piece(self, rows: PlacedRows, places: range) -> torch.Tensor:
        shape = self._shape(rows.slot, places)
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
        self, shape: FixedShape, start: int, token_ids: Sequence[int], rotary: torch.Tensor
    ) -> tuple[FixedForward, Replay]:
        """The shape's buffers, and its graph if there are to be graphs."""
        step = self._new_step(shape, rotary)
        if self._capture is None:
            return step, step.run
        step.fill(start, token_ids, rotary)
        try:
            expected = step.run().clone()
            if self._logits is None:
                most_rows = self._exact_rows or CAPTURED_ROWS[-1]
                self._logits = expected.new_empty(most_rows, expected.shape[1])
                step = self._new_step(shape, rotary)
                step.fill(start, token_ids, rotary)
            replay = self._capture(step.run)
            difference = float((replay() - expected).abs().max() / expected.abs().max())
        except RuntimeError as error:
            self._give_up(f"{shape} cannot be captured: {error}")
            return step, step.run
        if not difference <= _TOLERANCE:
            self._give_up(f"a replay of {shape} differs by {difference:.1e} of the largest logit")
            return step, step.run
        return step, replay

    def _new_step(self, shape: FixedShape, rotary: torch.Tensor) -> FixedForward:
        return FixedForward(
            shape,
            self._stack,
            self._cache,
            self._embedding,
            groups=self._groups,
            rotary=rotary,
            logits=self._logits,
        )

    def _give_up(self, reason: str) -> None:
        _log.warning("CUDA graphs are off from here on: %s", reason)
        self._capture = None
        self._steps.clear()
