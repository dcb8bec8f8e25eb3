"""One sequence, from its stream's opening to its end."""

from __future__ import annotations

from typing import Any

from hippo.engine.slots import Reservation
from hippo.models.base import Prompt
from hippo.rpc.queue import StreamQueue
from hippo.sampling import TokenSampler
from hippo.types import OpenRequest


class EngineSequence:
    """What both engines keep of a sequence.

    The event loop creates it, reads ``output`` and sets ``is_submitted``; everything else is the
    device thread's. ``prompt``, ``slot`` and ``sampler`` are there once it is submitted.
    """

    prompt: Prompt
    slot: int
    submitted_ns: int
    sampler: TokenSampler

    def __init__(self, request: OpenRequest, reservation: Reservation) -> None:
        self.request = request
        self.reservation = reservation
        self.output: StreamQueue[Any] = StreamQueue()
        self.is_submitted = False
        self.is_closed = False
        self.is_in_job = False
        self.job_ns = 0  # device time of its prefill
        self.wait_ns = 0  # time the device idled since this was last reported
        self.began_ns = 0  # start of its first device work

    def take_wait_ns(self) -> int:
        """The idle time since the last call."""
        wait_ns, self.wait_ns = self.wait_ns, 0
        return wait_ns
