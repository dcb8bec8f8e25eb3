"""Forwards of fixed shape: the numbers of rows and of cached tokens are each one of a few.

    rows     r0 r1 r2 p  p  p  p  p        3 tokens to feed, filled up to 8 rows
    places    7  8  9 10 11 12 13 14       cache indices of their keys and values
    cache    |0 ...  9|10 ... 255|         all 256 are read; row k is masked beyond its own place

Padding comes last and is written behind the sequence's end, where the next step overwrites it, so
no row attends to padding. Values that change from step to step are in buffers on the device, so a
forward can be captured as a CUDA graph (hippo.models.graphs) and replayed. With ``exact_rows`` a
row's arithmetic does not depend on the rows beside it: every forward holds one sequence and has the
same number of rows, and the number of cached tokens read follows from the row's own index. On a
device whose kernels treat every row of a product alike, a token's logits then have the same bits
whether the token was fed alone or in a block (docs/algorithms.md).
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
_MAX_KEPT = 288  # shapes whose buffers and graph are kept: all captured shapes of 32 slots
# The captured shapes, unless rows are exact. They are few so that graphs of every slot fit. Behind
# more tokens a kernel that takes a mask costs more than the launches do (hippo.models.flash).
CAPTURED_ROWS = (1, 8, MAX_GROUPED_ROWS)
_CAPTURED_STRETCHES = (1024, 2048, 4096)
_GRAPH_LAYER_BYTES = 27 * (16 << 10)  # 27 launches of 16 KiB: an estimate, not a measurement
_TOLERANCE = 1e-3  # of the largest logit: difference allowed between a graph and a plain run


@dataclass(frozen=True, slots=True)
class FixedShape:
    """The key of one set of buffers and one graph."""

    slot: int
    num_rows: int
    num_tokens: int  # cached tokens read, from the slot's first on


def spare_places(capacity: int, max_rows: int) -> int:
    """Returns how many places a cache needs behind ``capacity`` for padding and aligned reads."""
    return -capacity % MASK_ALIGNMENT + max_rows


def stretch(index: int, capacity: int) -> int:
    """Returns how many cached tokens are read for a row at cache index ``index``: up to 255 more
    than needed below 1,024 tokens, and up to a quarter more from 1,024 on."""
    num_tokens = index + 1
    step = max(_LEAST_STRETCH, 1 << max(num_tokens.bit_length() - 3, 0))
    return min(-(-num_tokens // step) * step, capacity + -capacity % MASK_ALIGNMENT)


def captured_stretch(index: int, capacity: int) -> int:
    """Returns how many cached tokens a graph reads for a last row at cache index ``index``, which
    must be below the longest captured stretch."""
    num_tokens = next(size for size in _CAPTURED_STRETCHES if size > index)
    return min(num_tokens, capacity + -capacity % MASK_ALIGNMENT)


def graph_bytes(num_layers: int) -> int:
    """Returns the estimated device memory of one slot's graphs, in bytes."""
    num_shapes = len(CAPTURED_ROWS) * len(_CAPTURED_STRETCHES)
    return num_shapes * num_layers * _GRAPH_LAYER_BYTES


def split_rows(start: int, num_rows: int, *, max_rows: int, capacity: int) -> list[range]:
    """Cuts ``num_rows`` cache indices from ``start`` on into pieces of at most ``max_rows``, each
    within one ``stretch``."""
    pieces: list[range] = []
    end = start + num_rows
    while start < end:
        stop = min(end, start + max_rows, stretch(start, capacity))
        pieces.append(range(start, stop))
        start = stop
    return pieces


class FixedForward:
    """The buffers of one shape, and the forward that reads them.

    ``fill_buffers`` sets the input. ``run`` reads only the buffers and no value of the host, so it
    can be captured. ``logits`` (float32 ``[most rows, num_token_ids]``) is an output buffer of all
    shapes, so that a graph needs no memory of its own for logits.
    """

    def __init__(
        self,
        shape: FixedShape,
        stack: DecoderStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        *,
        rotary: torch.Tensor,
        logits: torch.Tensor | None = None,
    ) -> None:
        rows, tokens, device = shape.num_rows, shape.num_tokens, cache.device
        groups = stack.groups
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

    def fill_buffers(self, start: int, token_ids: Sequence[int], rotary: torch.Tensor) -> None:
        """Sets the tokens from cache index ``start`` on; the last one is repeated as padding."""
        rows = self._fed.shape[1]
        padding = rows - len(token_ids)
        ids = [*token_ids, *[token_ids[-1]] * padding]
        self._fed.copy_(torch.tensor([ids, range(start, start + rows)]), non_blocking=True)
        self._rotary[: len(token_ids)].copy_(rotary)

    def run(self) -> torch.Tensor:
        """Computes logits, float32 ``[num_rows, num_token_ids]``."""
        hidden_from = self._columns > self._fed[1][:, None]
        self._mask.zero_().masked_fill_(hidden_from[:, None], -torch.inf)
        hidden = torch.embedding(self._embedding, self._fed[0])
        hidden = self._stack.run(hidden, self._rotary, self._step, 0, self._stack.num_layers)
        logits = self._stack.logits(hidden)
        return logits if self._logits is None else self._logits.copy_(logits)


class FixedRunner:
    """Chooses the shape of each forward, and keeps the buffers and graphs of recent shapes.

    ``exact_rows``: every forward has that many rows (see the module). None: rows are padded to
    the next captured number, and ``covers`` is False for several sequences, long contexts and
    shapes beyond the number that is kept. Without ``capture`` nothing is captured. After a failed
    capture, or a replay that differs from the plain run, no graph is used any more.
    """

    def __init__(
        self,
        stack: DecoderStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        *,
        exact_rows: int | None = None,
        capture: Capture | None = None,
    ) -> None:
        assert exact_rows is not None or capture is not None, "neither exact rows nor graphs"
        assert (exact_rows or 1) <= MAX_GROUPED_ROWS
        self._stack = stack
        self._cache = cache
        self._embedding = embedding
        self._exact_rows = exact_rows
        self._capture = capture
        self._steps: OrderedDict[FixedShape, tuple[FixedForward, Replay]] = OrderedDict()
        self._logits: torch.Tensor | None = None  # allocated with the first shape

    def covers(self, sequences: Sequence[PlacedRows]) -> bool:
        """Whether ``forward`` can run these rows."""
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
        """Returns float32 logits ``[all rows, num_token_ids]``, valid until the next call."""
        outputs = []
        for rows in sequences:
            if self._exact_rows is None:
                pieces = [range(rows.start, rows.end)]
            else:
                pieces = split_rows(
                    rows.start,
                    rows.num_rows,
                    max_rows=self._exact_rows,
                    capacity=self._cache.shape.capacity,
                )
            for piece in pieces:
                outputs.append(self._run_piece(rows, piece))
                if len(pieces) > 1 or len(sequences) > 1:
                    outputs[-1] = outputs[-1].clone()  # the next piece may overwrite the output
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def capture_all(self, rotary: torch.Tensor) -> Iterator[int]:
        """Captures the usual shapes, slot by slot, up to the number kept, so that no request waits
        for a capture; none with exact rows. ``rotary`` is as in PlacedRows, for any rows. Yields
        the number of graphs after each capture."""
        if self._exact_rows is not None:
            return
        cache = self._cache.shape
        ends = sorted({min(size, cache.capacity) for size in _CAPTURED_STRETCHES})
        for slot, end, rows in itertools.product(range(cache.num_slots), ends, CAPTURED_ROWS):
            placed = PlacedRows(slot, end - rows, (0,) * rows, rotary[:rows])
            if rows <= end and self.covers((placed,)):
                with torch.inference_mode():
                    self.forward((placed,))
                if self._capture is None:  # a capture failed
                    return
                yield len(self._steps)

    def _shape(self, slot: int, places: range) -> FixedShape:
        """Returns the shape for rows at these cache indices."""
        capacity = self._cache.shape.capacity
        if self._exact_rows is not None:
            return FixedShape(slot, self._exact_rows, stretch(places[-1], capacity))
        num_rows = next(size for size in CAPTURED_ROWS if size >= len(places))
        return FixedShape(slot, num_rows, captured_stretch(places[-1], capacity))

    def _run_piece(self, rows: PlacedRows, places: range) -> torch.Tensor:
        shape = self._shape(rows.slot, places)
        self._cache.zero_unwritten(shape.slot, places.start, shape.num_tokens + shape.num_rows)
        first = places.start - rows.start
        taken = slice(first, first + len(places))
        entry = self._steps.get(shape)
        if entry is None:
            entry = self._make_entry(shape, places.start, rows.token_ids[taken], rows.rotary[taken])
            self._steps[shape] = entry
            if len(self._steps) > _MAX_KEPT:
                self._steps.popitem(last=False)
        else:
            self._steps.move_to_end(shape)
        step, replay = entry
        step.fill_buffers(places.start, rows.token_ids[taken], rows.rotary[taken])
        return replay()[: len(places)]

    def _make_entry(
        self, shape: FixedShape, start: int, token_ids: Sequence[int], rotary: torch.Tensor
    ) -> tuple[FixedForward, Replay]:
        """Makes the shape's buffers, and captures its graph if graphs are on."""
        step = self._new_step(shape, rotary)
        if self._capture is None:
            return step, step.run
        step.fill_buffers(start, token_ids, rotary)
        try:
            expected = step.run().clone()
            if self._logits is None:
                most_rows = self._exact_rows or CAPTURED_ROWS[-1]
                self._logits = expected.new_empty(most_rows, expected.shape[1])
                step = self._new_step(shape, rotary)
                step.fill_buffers(start, token_ids, rotary)
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
            shape, self._stack, self._cache, self._embedding, rotary=rotary, logits=self._logits
        )

    def _give_up(self, reason: str) -> None:
        _log.warning("CUDA graphs are off from here on: %s", reason)
        self._capture = None
        self._steps.clear()
