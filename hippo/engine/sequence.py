"""One sequence, from its stream's opening to its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hippo.engine.prompts import ReadPrompt
from hippo.engine.slots import SlotPool
from hippo.models.base import Prompt, StepPlan
from hippo.models.content import CachedRows, no_rows
from hippo.rpc.queue import StreamQueue
from hippo.sampling.sampler import TokenSampler
from hippo.speculation.core import Core, Step
from hippo.types import OpenRequest, PromptInfo, Timing

if TYPE_CHECKING:
    from hippo.engine.engine import Engine


class EngineSequence(ABC):
    """What an engine keeps of a sequence; a service's own kind says how its prefill goes.

    The event loop creates it, reads ``output`` and sets ``is_submitted``; everything else is the
    device thread's. ``prompt``, ``rows`` (the whole prompt's), ``slot`` and ``sampler`` are there
    once it is submitted. ``held`` is what its slot
    holds for certain, the completion left out.
    """

    prompt: Prompt
    rows: CachedRows
    slot: int
    submitted_ns: int
    sampler: TokenSampler

    tells_prefill = False  # whether the prefill's timing is a message of its own

    def __init__(
        self,
        request: OpenRequest,
        slots: SlotPool,
        core: Core,
        *,
        num_top_logprobs: int | None = None,
    ) -> None:
        """Raises OverloadedError where neither a slot nor a place in the queue is free."""
        self.request = request
        self.reservation = slots.reserve()
        self.core = core
        self.num_top_logprobs = num_top_logprobs  # of each token; None: none at all
        self.output: StreamQueue[Any] = StreamQueue()
        self.held = no_rows()
        self.is_submitted = False
        self.is_closed = False
        self.job_ns = 0  # device time of its prefill
        self.wait_ns = 0  # time the device idled since this was last reported
        self.began_ns = 0  # start of its first device work
        self.ready_ns = 0  # end of its last step or prefill

    def announce(self, info: PromptInfo, prompt: Prompt) -> None:
        """The prompt is read: says what can be said now (event loop)."""
        self.output.put(info)

    def prepare(
        self,
        read: ReadPrompt,
        slot: int,
        held: CachedRows,
        *,
        submitted_ns: int,
        num_token_ids: int,
        device: torch.device,
    ) -> None:
        """It has a prompt and a slot now (device thread)."""
        self.slot, self.held, self.submitted_ns = slot, held, submitted_ns
        self.prompt, self.rows = read.prompt, read.rows
        self.core.set_max_tokens(read.max_tokens)
        self.sampler = TokenSampler(
            self.request.sampling,
            read.prompt.input_ids,
            num_token_ids,
            device,
            end_token_ids=self.request.end_token_ids,
        )

    @abstractmethod
    def begin(self, engine: Engine) -> None:
        """Starts the first job (device thread)."""

    def receive(self, engine: Engine, message: Any) -> None:
        """A message arrived; raises HippoError for one that breaks the rules (device thread)."""
        self.core.receive(message)

    def time_step(self, step: Step, plan: StepPlan, *, began_ns: int, ended_ns: int) -> Timing:
        """Where the time went since the last step ended; ``plan`` is the forward's."""
        wait_ns = self.take_wait_ns()
        queue_ns = max(began_ns - self.ready_ns - wait_ns, 0)
        self.ready_ns = ended_ns
        return Timing(
            queue_ns=queue_ns,
            forward_ns=ended_ns - began_ns,
            wait_ns=wait_ns,
            num_rows=len(step.token_ids),
            context_length=self.prompt.length + step.start_index,
            num_sequences=len(plan.sequences),
            num_batch_rows=plan.num_rows,
        )

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
