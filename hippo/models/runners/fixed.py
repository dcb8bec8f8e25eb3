"""Forwards whose arithmetic for a row does not depend on the rows beside it.

    rows     r0 r1 r2 p  p  p  p  p        3 tokens to feed, filled up to 8 rows
    places    7  8  9 10 11 12 13 14       cache indices of their keys and values
    cache    |0 ...  9|10 ... 255|         all 256 are read; row k is masked beyond its own place

Every forward holds one sequence and has the same number of rows, and the number of cached tokens
read follows from the row's own index. Where the kernels treat every row of a product alike, a
token's logits then have the same bits whether the token was fed alone or in a block
(docs/algorithms.md). Not all kernels do: fbgemm by AVX2 multiplies five rows of seven by one kernel
and two by another. So ``fit_rows`` measures it with the model's own products.

Padding comes last and is written behind the sequence's end, where the next step overwrites it, so
no row attends to padding.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from hippo.models.attention.cache import MASK_ALIGNMENT, KeyValueCache
from hippo.models.attention.parts import AttentionPlan, SequencePart, plan_sequence
from hippo.models.attention.rows import PlacedRows
from hippo.models.interface.plan import MAX_GROUPED_ROWS
from hippo.models.interface.transfer import to_device
from hippo.models.runners.decoder import DecoderStack

_log = logging.getLogger(__name__)

_LEAST_STRETCH = 256  # tokens


class FixedRunner(Protocol):
    """Runs forwards of few shapes."""

    def covers(self, sequences: Sequence[PlacedRows]) -> bool:
        """Whether ``forward`` can run these rows."""

    def forward(self, sequences: Sequence[PlacedRows]) -> torch.Tensor:
        """Returns float32 logits ``[all rows, num_token_ids]``, valid until the next call."""

    def capture_all(self, rotary: torch.Tensor) -> Iterator[int]:
        """Captures all shapes as CUDA graphs, if the runner uses graphs, so that no request waits
        for a capture. ``rotary`` is as in PlacedRows, for any rows. Yields the number of graphs
        after each capture."""


def spare_places(capacity: int, max_rows: int) -> int:
    """Returns how many places a cache needs behind ``capacity`` for padding and aligned reads."""
    return -capacity % MASK_ALIGNMENT + max_rows


def stretch(index: int, capacity: int) -> int:
    """Returns how many cached tokens are read for a row at cache index ``index``: up to 255 more
    than needed below 1,024 tokens, and up to a quarter more from 1,024 on."""
    num_tokens = index + 1
    step = max(_LEAST_STRETCH, 1 << max(num_tokens.bit_length() - 3, 0))
    return min(-(-num_tokens // step) * step, capacity + -capacity % MASK_ALIGNMENT)


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


class ExactRunner:
    """Runs all rows in forwards of ``num_rows`` rows of one sequence; see the module."""

    def __init__(
        self, stack: DecoderStack, cache: KeyValueCache, embedding: torch.Tensor, *, num_rows: int
    ) -> None:
        assert 1 <= num_rows <= MAX_GROUPED_ROWS
        self._stack = stack
        self._cache = cache
        self._embedding = embedding
        self._num_rows = num_rows

    def covers(self, sequences: Sequence[PlacedRows]) -> bool:
        """See FixedRunner.covers; all rows."""
        return True

    def forward(self, sequences: Sequence[PlacedRows]) -> torch.Tensor:
        """See FixedRunner.forward."""
        outputs = [
            self._run_piece(rows, piece, self._num_rows)
            for rows in sequences
            for piece in split_rows(
                rows.start,
                rows.num_rows,
                max_rows=self._num_rows,
                capacity=self._cache.shape.capacity,
            )
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def capture_all(self, rotary: torch.Tensor) -> Iterator[int]:
        """See FixedRunner.capture_all; nothing is captured."""
        return iter(())

    @torch.inference_mode()
    def fit_rows(self, rotary: torch.Tensor) -> None:
        """Lowers ``num_rows`` to the most for which a token's logits have the same bits in each
        place of a forward. ``rotary`` is as in capture_all; slot 0 is empty, and stays so."""
        asked = self._num_rows
        while self._num_rows > 1 and not (
            self._attends_alike(self._num_rows) and self._is_alike(self._num_rows, rotary)
        ):
            self._num_rows -= 1
        if self._num_rows < asked:
            _log.warning(
                "steps of %d rows instead of %d (--deterministic-rows): with more, kernels of this "
                "device give a token's logits other bits in other places of a step",
                self._num_rows,
                asked,
            )

    def _attends_alike(self, num_rows: int) -> bool:
        """Whether equal rows have equal bits after attention. Where the cache is wider than the
        model's dtype, rounding hides a difference in most tokens' logits, but not in all."""
        cache, groups = self._cache, self._stack.groups
        shape = cache.shape
        num_tokens = stretch(0, shape.capacity)
        generator = torch.Generator().manual_seed(0)

        def numbers(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(cache.device, cache.dtype)

        keys, values = ([numbers(shape.num_kv_heads, 1, num_tokens, shape.head_dim)] for _ in "kv")
        mask = torch.zeros(num_rows * groups, num_tokens, dtype=cache.dtype, device=cache.device)
        part = replace(self._part(0, 0, num_rows, num_tokens), keys=keys, values=values, mask=mask)
        query = numbers(1, shape.num_kv_heads, groups, shape.head_dim)
        found = part.read_cache(query.expand(num_rows, -1, -1, -1), 0, self._stack.scaling)
        return bool((found == found[0]).all())

    def _is_alike(self, num_rows: int, rotary: torch.Tensor) -> bool:
        """Whether tokens have the same logits together, each in its own place, and in the first
        place alone."""
        places = range(min(num_rows, self._cache.shape.capacity))
        ids = tuple(1 + place % (self._embedding.shape[0] - 1) for place in places)
        rows = PlacedRows(0, 0, ids, rotary[: len(places)])
        together = self._run_piece(rows, places, num_rows)
        alone = [self._run_piece(rows, range(place, place + 1), num_rows) for place in places]
        self._cache.forget_slot(0)
        return torch.equal(torch.cat(alone), together)

    def _run_piece(self, rows: PlacedRows, places: range, num_rows: int) -> torch.Tensor:
        """Runs the rows at cache indices ``places`` in a forward of ``num_rows``; the last one is
        repeated as padding."""
        cache = self._cache
        num_tokens = stretch(places[-1], cache.shape.capacity)
        cache.zero_unwritten(rows.slot, places.start, num_tokens + num_rows)
        taken = slice(places.start - rows.start, places.stop - rows.start)
        padding = num_rows - len(places)
        token_ids = [*rows.token_ids[taken], *[0] * padding]
        rotary = rows.rotary[taken]
        rotary = torch.cat((rotary, rotary[-1:].expand(padding, *rotary.shape[1:])))
        part = self._part(rows.slot, places.start, num_rows, num_tokens)
        hidden = torch.embedding(self._embedding, to_device(token_ids, cache.device))
        own = (rows.state_rows(0, places),) if cache.states else ()
        step = AttentionPlan((part,), cache.dtype, states=cache.states, state_rows=own)
        hidden = self._stack.run(hidden, rotary, step, 0, self._stack.num_layers)
        return self._stack.logits(hidden)[: len(places)]

    def _part(self, slot: int, start: int, num_rows: int, num_tokens: int) -> SequencePart:
        return plan_sequence(
            self._cache,
            slot,
            first_row=0,
            start=start,
            num_rows=num_rows,
            groups=self._stack.groups,
            num_tokens=num_tokens,
        )
