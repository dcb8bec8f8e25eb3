"""One sequence, from its stream's opening to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hippo.engine.slots import Reservation
from hippo.models.base import Prompt
from hippo.models.content import CachedRows, no_rows
from hippo.rpc.queue import StreamQueue
from hippo.sampling import TokenSampler
from hippo.types import OpenRequest


class EngineSequence:
    """What both engines keep of a sequence.

    The event loop creates it, reads ``output`` and sets ``is_submitted``; everything else is the
    device thread's. ``prompt``, ``rows`` (the whole prompt's), ``max_tokens`` (as many as fit
    behind it), ``slot`` and ``sampler`` are there once it is submitted. ``held`` is what its slot
    holds for certain, the completion left out.
    """

    prompt: Prompt
    rows: CachedRows
    max_tokens: int
    slot: int
    submitted_ns: int
    sampler: TokenSampler

    def __init__(self, request: OpenRequest, reservation: Reservation) -> None:
        self.request = request
        self.reservation = reservation
        self.output: StreamQueue[Any] = StreamQueue()
        self.held = no_rows()
        self.is_submitted = False
        self.is_closed = False
        self.job_ns = 0  # device time of its prefill
        self.wait_ns = 0  # time the device idled since this was last reported
        self.began_ns = 0  # start of its first device work

    def take_over(self, rows: CachedRows, *, most: int | None = None) -> int:
        """A prefill of ``rows`` begins: how many of them the slot holds already.

        At most ``most``, and never the last one, whose logits are wanted. From here on nothing
        else counts as held, until the prefill is over and ``held`` is set to all its rows: where
        it is left, those that were taken over are still whole.
        """
        num_reused = min(rows.common_length(self.held), len(rows) - 1)
        if most is not None:
            num_reused = min(num_reused, most)
        self.held = rows.first(num_reused)
        return num_reused

    def held_at_end(self, fed_ids: Sequence[int]) -> CachedRows:
        """What the slot holds when the sequence is over; ``fed_ids`` are the leading completion
        ids whose keys and values are there."""
        if not fed_ids:
            return self.held
        return self.held.followed_by(fed_ids, self.prompt.next_position)

    def take_wait_ns(self) -> int:
        """The idle time since the last call."""
        wait_ns, self.wait_ns = self.wait_ns, 0
        return wait_ns
