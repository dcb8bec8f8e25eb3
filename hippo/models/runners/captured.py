"""Steps captured as CUDA graphs, of few shapes that serve all slots and all context lengths.

    sequences   r0 r1 p  p  | r2 r3 r4 p  | p  p  p  p  | p  p  p  p      of 4 x 4 rows

A step is filled up to a power of two of sequences and of rows of each. What changes from step to
step (token ids, rotary factors, where sequences begin in the cache and how long they are) is in
buffers on the device, from which the operations read it (hippo.models.attention.ranges). A row of
padding is written behind its sequence's end, where the next step overwrites it; padding sequences
are written behind the capacity of slot 0, attend to nothing cached, and nothing attends to them.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hippo.models.attention.cache import KeyValueCache
from hippo.models.attention.parts import AttentionPlan
from hippo.models.attention.ranges import FlashUse, RangesPart
from hippo.models.attention.rows import PlacedRows
from hippo.models.interface.plan import MAX_GROUPED_ROWS, LoadPlan
from hippo.models.interface.transfer import to_device
from hippo.models.products.kernels import difference_of
from hippo.models.runners.decoder import DecoderStack
from hippo.models.runners.fixed import ExactRunner, FixedRunner
from hippo.models.runners.graphs import Capture, CudaGraphs, Replay

_log = logging.getLogger(__name__)

# Padding is almost free while products take as long as reading their weights: on the supported GPU
# with the least arithmetic for its bandwidth, an A100, up to 312 TFLOP/s / 2.04 TB/s = 153 rows.
MOST_ROWS = 128

# FlashAttention divides a prefix into parts by the longest prefix that a graph can have, and then
# joins the parts. With prefixes of up to 25,664 tokens, a step of Qwen2.5-VL-3B on an H200 spent
# 0.8 of 4.6 ms on joining. A single sequence, whose prefix is divided most, therefore has graphs
# for short prefixes too, such as the draft has, which sees a tenth of the visual tokens.
_SHORT_PREFIX = 4096

_PERIOD = 257  # tokens after which the numbers that fill the cache repeat; a prime

GRAPH_LAYER_BYTES = 27 * (16 << 10)
"""Device memory of a graph for each layer: 27 launches of 16 KiB, which is an estimate."""


@dataclass(frozen=True, slots=True)
class CapturedShape:
    """The key of one set of buffers and one graph."""

    num_sequences: int
    rows_each: int
    capacity: int  # tokens of a sequence, the rows included

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return self.num_sequences * self.rows_each


def shapes_of(num_slots: int, capacity: int) -> list[CapturedShape]:
    """Returns all shapes of steps, the largest first, whose memory the other graphs can use."""
    shapes = [
        CapturedShape(num_sequences, rows_each, most)
        for num_sequences in _powers_up_to(_power_from(num_slots))
        for most in ({capacity, min(_SHORT_PREFIX, capacity)} if num_sequences == 1 else {capacity})
        for rows_each in _powers_up_to(min(MAX_GROUPED_ROWS, capacity - 1))
        if num_sequences * rows_each <= MOST_ROWS
    ]
    return sorted(shapes, key=lambda shape: (shape.num_rows, shape.capacity), reverse=True)


def most_graphs(num_slots: int) -> int:
    """Returns the number of graphs where the context is long."""
    return len(shapes_of(num_slots, _SHORT_PREFIX + 1))


def _power_from(number: int) -> int:
    """Returns the least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def _powers_up_to(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


class CapturedForward:
    """The buffers of one shape, and the forward that reads them.

    ``fill_buffers`` sets the input. ``run`` reads only the buffers and no value of the host, so it
    can be captured. ``logits`` (float32 ``[most rows, num_token_ids]``) is an output buffer of all
    shapes, so that a graph needs no memory of its own for logits.
    """

    def __init__(
        self,
        shape: CapturedShape,
        stack: DecoderStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        *,
        rotary: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        count, each, device = shape.num_sequences, shape.rows_each, cache.device
        self._shape = shape
        self._stack = stack
        self._cache = cache
        self._embedding = embedding
        self._logits = logits[: shape.num_rows]
        self._fed = torch.zeros(2, shape.num_rows, dtype=torch.int64, device=device)  # ids, places
        self._ranges = torch.zeros(2 * count + 1, dtype=torch.int32, device=device)
        self._rotary = rotary.new_zeros(shape.num_rows, *rotary.shape[1:])
        starts, lengths = torch.split(self._ranges, [count + 1, count])
        units = torch.arange(count + 1, dtype=torch.int32, device=device)
        part = RangesPart(
            first_row=0,
            num_rows=shape.num_rows,
            cache=cache,
            most_rows=each,
            most_tokens=shape.capacity,
            places=self._fed[1],
            units=units,
            starts=starts,
            lengths=lengths,
            bounds=units * each,
        )
        self._step = AttentionPlan((part,), cache.dtype)

    def fill_buffers(self, sequences: Sequence[PlacedRows]) -> None:
        """Sets the tokens of each sequence."""
        shape, cache = self._shape, self._cache
        ids: list[int] = []
        places: list[int] = []
        rotary: list[torch.Tensor] = []
        for rows in sequences:
            padding = shape.rows_each - rows.num_rows
            ids += [*rows.token_ids, *[0] * padding]
            last = rows.rotary[-1:]
            rotary += [rows.rotary, last.expand(padding, *last.shape[1:])]
            first = cache.row_of(rows.slot, rows.start)
            places += range(first, first + shape.rows_each)
        starts = [cache.row_of(rows.slot, 0) for rows in sequences]
        own = shape.rows_each == 1  # the row itself is one of the tokens that it attends to
        lengths = [rows.start + own for rows in sequences]
        missing = shape.num_sequences - len(sequences)
        spare = cache.row_of(0, cache.shape.capacity)
        ids += [0] * (missing * shape.rows_each)
        places += [*range(spare, spare + shape.rows_each)] * missing
        ranges = [*starts, *[0] * (missing + 1), *lengths, *[0] * missing]
        self._fed.copy_(torch.tensor([ids, places]), non_blocking=True)
        self._ranges.copy_(torch.tensor(ranges, dtype=torch.int32), non_blocking=True)
        torch.cat(rotary, out=self._rotary[: len(sequences) * shape.rows_each])

    def run(self) -> torch.Tensor:
        """Computes logits, float32 ``[num_rows, num_token_ids]``."""
        hidden = torch.embedding(self._embedding, self._fed[0])
        hidden = self._stack.run(hidden, self._rotary, self._step, 0, self._stack.num_layers)
        return self._logits.copy_(self._stack.logits(hidden))


class CapturedRunner:
    """Runs steps by graphs, on a device with hippo.models.attention.ranges.

    With ``exact_rows`` every step has that many rows, and each row is a sequence of its own, which
    attends to the cached tokens up to its place: a row's arithmetic does not depend on the rows
    beside it (hippo.models.runners.fixed). After a failed capture, or a replay that differs from
    the plain run, no graph is used any more.
    """

    def __init__(
        self,
        stack: DecoderStack,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        capture: Capture,
        *,
        exact_rows: int | None = None,
    ) -> None:
        assert cache.shape.num_spare >= (1 if exact_rows else MAX_GROUPED_ROWS)
        self._stack = stack
        self._cache = cache
        self._embedding = embedding
        self._capture: Capture | None = capture
        self._exact_rows = exact_rows
        self._steps: dict[CapturedShape, tuple[CapturedForward, Replay]] = {}
        sizes = (max(MOST_ROWS, exact_rows or 1), stack.num_token_ids)
        self._logits = torch.empty(sizes, dtype=torch.float32, device=cache.device)

    def covers(self, sequences: Sequence[PlacedRows]) -> bool:
        """See FixedRunner.covers."""
        if self._exact_rows is not None:
            return True
        return self._capture is not None and self._shape(sequences) is not None

    def forward(self, sequences: Sequence[PlacedRows]) -> torch.Tensor:
        """See FixedRunner.forward."""
        if self._exact_rows is None:
            shape = self._shape(sequences)
            assert shape is not None, "see covers"
            return self._run_step(shape, sequences)
        shape = CapturedShape(self._exact_rows, 1, self._cache.shape.capacity)
        alone = [row for rows in sequences for row in _single_rows(rows)]
        count = self._exact_rows
        groups = [alone[first : first + count] for first in range(0, len(alone), count)]
        if len(groups) == 1:
            return self._run_step(shape, groups[0])
        # A result may be a view of the graph's output, which the next group overwrites.
        return torch.cat([self._run_step(shape, group).clone() for group in groups])

    def capture_all(self, rotary: torch.Tensor) -> Iterator[int]:
        """See FixedRunner.capture_all."""
        cache = self._cache.shape
        shapes = shapes_of(cache.num_slots, cache.capacity)
        if self._exact_rows is not None:
            shapes = [CapturedShape(self._exact_rows, 1, cache.capacity)]
        if self._capture is None:
            return
        self._fill_cache()
        for shape in shapes:
            slots = range(min(shape.num_sequences, cache.num_slots))
            count = shape.rows_each
            longest = shape.capacity - count
            # Captured with the longest sequences; then others are where these were.
            for start, order in ((longest, slots), (longest // 2 + 1, reversed(slots))):
                rows = [PlacedRows(slot, start, (0,) * count, rotary[:count]) for slot in order]
                try:
                    with torch.inference_mode():
                        self._check_step(shape, rows)
                except RuntimeError as error:  # such as a lack of memory
                    self._give_up(shape, f"a step fails: {error}")
                if self._capture is None:
                    return
            yield len(self._steps)

    @torch.inference_mode()
    def _fill_cache(self) -> None:
        """Fills all slots with random numbers, so that a step that reads other tokens than it
        should gives other logits."""
        places = torch.arange(self._cache.shape.num_places, device=self._cache.device)
        generator = torch.Generator().manual_seed(0)
        for slot in range(self._cache.shape.num_slots):
            for view in self._cache.slot(slot):
                numbers = torch.randn(*view.shape[:2], _PERIOD, view.shape[3], generator=generator)
                own = to_device(numbers.to(view.dtype), view.device)
                view.copy_(own.index_select(2, places % _PERIOD))

    def _shape(self, sequences: Sequence[PlacedRows]) -> CapturedShape | None:
        """Returns the shape for these rows; None if they are too many."""
        most = max((rows.num_rows for rows in sequences), default=0)
        count, each, capacity = (
            _power_from(len(sequences)),
            _power_from(most),
            self._cache.shape.capacity,
        )
        if count == 1 and sequences[0].start + each <= _SHORT_PREFIX:
            capacity = min(_SHORT_PREFIX, capacity)
        is_small = 0 < most <= MAX_GROUPED_ROWS and count * each <= MOST_ROWS
        return CapturedShape(count, each, capacity) if is_small else None

    def _run_step(self, shape: CapturedShape, sequences: Sequence[PlacedRows]) -> torch.Tensor:
        entry = self._steps.get(shape)
        if entry is None:
            entry = self._steps[shape] = self._make_entry(shape, sequences)
        step, replay = entry
        step.fill_buffers(sequences)
        logits = replay()
        logits = logits.view(shape.num_sequences, shape.rows_each, logits.shape[1])
        parts = [logits[index, : rows.num_rows] for index, rows in enumerate(sequences)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _make_entry(
        self, shape: CapturedShape, sequences: Sequence[PlacedRows]
    ) -> tuple[CapturedForward, Replay]:
        """Makes the shape's buffers, and captures its graph if graphs are on."""
        rotary = sequences[0].rotary
        step = CapturedForward(
            shape, self._stack, self._cache, self._embedding, rotary=rotary, logits=self._logits
        )
        if self._capture is None:
            return step, step.run
        step.fill_buffers(sequences)
        try:
            expected = step.run().clone()
            replay = self._capture(step.run)
        except RuntimeError as error:
            self._give_up(shape, f"it cannot be captured: {error}")
            return step, step.run
        return step, replay if self._agrees(shape, replay(), expected) else step.run

    def _check_step(self, shape: CapturedShape, sequences: Sequence[PlacedRows]) -> None:
        """Runs a step as captured, and gives graphs up if the plain run differs from the replay."""
        self._run_step(shape, sequences)
        if self._capture is not None:
            step, replay = self._steps[shape]
            self._agrees(shape, replay().clone(), step.run())

    def _agrees(self, shape: CapturedShape, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether a replay gave the plain run's logits; gives graphs up if not."""
        difference = difference_of(found, expected, self._embedding.dtype)
        if difference is not None:
            self._give_up(shape, difference)
        return difference is None

    def _give_up(self, shape: CapturedShape, reason: str) -> None:
        _log.warning("CUDA graphs are off from here on: %s: %s", shape, reason)
        self._capture = None
        self._steps.clear()


def make_fixed_runner(
    plan: LoadPlan,
    stack: DecoderStack,
    cache: KeyValueCache,
    embedding: torch.Tensor,
    flash: FlashUse,
) -> FixedRunner | None:
    """Returns the runner of captured or exact steps, if the plan asks for one; logs a warning if
    the device cannot have graphs (on level info if they are only to be used where possible). Layers
    with states have none."""
    if plan.has_graphs and cache.states:
        _log.info("CUDA graphs are off: layers with states have none")
    elif plan.has_graphs:
        if flash.has_ranges:
            capture = CudaGraphs(cache.device).capture_graph
            return CapturedRunner(stack, cache, embedding, capture, exact_rows=plan.exact_rows)
        level = logging.WARNING if plan.cuda_graphs == "on" else logging.INFO
        _log.log(level, "CUDA graphs are off: they need FlashAttention, and %s", flash.reason)
    if plan.exact_rows is not None:
        return ExactRunner(stack, cache, embedding, num_rows=plan.exact_rows)
    return None


def _single_rows(rows: PlacedRows) -> Iterator[PlacedRows]:
    for index, token_id in enumerate(rows.token_ids):
        yield replace(
            rows,
            start=rows.start + index,
            token_ids=(token_id,),
            rotary=rows.rotary[index : index + 1],
        )
