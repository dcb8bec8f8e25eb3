"""One sequence, from its stream's opening to its end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from hippo.engine.bounded import VisionCache
from hippo.engine.prompts import ReadPrompt
from hippo.engine.slots import SlotPool
from hippo.engine.spans import Stages
from hippo.models.interface.base import PrefillHelp, Prompt, StepPlan, VideoLanguageModel
from hippo.models.interface.content import CachedRows, no_rows
from hippo.rpc.queue import StreamQueue
from hippo.sampling.sampler import TokenSampler
from hippo.speculation.core import Step
from hippo.speculation.drafter import Drafter
from hippo.speculation.sharpness import Sharpness
from hippo.speculation.verifier import Verifier
from hippo.types import ModelInfo, OpenRequest, PromptInfo, Timing

Job = Generator[None, None, None]
"""Device work that runs one piece up to each yield."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What the engine gets of a sequence whose prompt is read."""

    read: ReadPrompt
    slot: int
    held: CachedRows  # the rows that the slot holds of its previous sequence
    submitted_ns: int


class SequenceHost(Protocol):
    """What a sequence may ask of its engine, on the device thread."""

    @property
    def model(self) -> VideoLanguageModel: ...

    @property
    def vision_cache(self) -> VisionCache: ...

    @property
    def is_alone(self) -> bool:
        """Whether there is one sequence."""

    def start_job(self, sequence: "EngineSequence", job: Job) -> None:
        """Queues device work whose pieces run between two forwards."""

    def emit_message(self, sequence: "EngineSequence", message: Any) -> None:
        """Sends a message on the sequence's stream."""

    def take_over_rows(
        self, sequence: "EngineSequence", rows: CachedRows, *, most: int | None = None
    ) -> int:
        """Begins a prefill of ``rows``; returns how many of the rows the slot already holds.

        The result is at most ``most`` and excludes the last row, whose logits are needed. If the
        slot of another running sequence holds more of the rows, they are copied first, so that of
        several choices of a request only the first computes the common rows.
        """

    def finish_prefill(
        self,
        sequence: "EngineSequence",
        logits: torch.Tensor,
        *,
        rows: CachedRows,
        num_reused: int,
        wait_ns: int = 0,
    ) -> None:
        """Starts the core after the prefill of ``rows``, with ``logits`` ``[vocabulary]``."""


class EngineSequence(ABC):
    """The engine's state of one sequence; each service's subclass implements the prefill.

    The event loop creates the sequence, reads ``output`` and sets ``is_submitted``; only the device
    thread uses the rest. ``prompt``, ``rows`` (of the whole prompt), ``slot`` and ``sampler`` are
    set by ``accept``. ``held`` describes the valid rows of the slot, without the completion.
    """

    prompt: Prompt
    rows: CachedRows
    slot: int
    submitted_ns: int
    sampler: TokenSampler

    sends_prefill_timing = False  # as a separate message after the prefill
    proposes = False  # whether the sampler proposes tokens, as a draft's
    sharpness: Sharpness | None = None  # a draft has it at a temperature above 0

    def __init__(
        self,
        request: OpenRequest,
        slots: SlotPool,
        core: Drafter | Verifier,
        *,
        num_top_logprobs: int | None = None,
    ) -> None:
        """Raises OverloadedError if neither a slot nor a place in the queue is free."""
        self.request = request
        self.reservation = slots.reserve_slot(
            sum(len(item.data) for item in request.media),
            client=request.client,
            may_wait=not request.must_not_wait,
        )
        self.core = core
        self.num_top_logprobs = num_top_logprobs  # per token; None: no log-probabilities
        self.output: StreamQueue[Any] = StreamQueue()
        self.held = no_rows()
        self.is_submitted = False
        self.is_closed = False
        self.is_paused = False  # its jobs wait
        self.job_ns = 0  # device time of its prefill, without the piece in progress
        self.piece_began_ns = 0  # start of the piece in progress, or of the last one
        self.help: PrefillHelp | None = None
        self.vision_ns = 0  # the part of it that the vision tower took
        self.wait_ns = 0  # idle time of the device since the last take_wait_ns
        self.began_ns = 0  # start of its first device work
        self.ready_ns = 0  # end of its last step or prefill
        self.stages = Stages()

    def announce_prompt(self, info: PromptInfo, prompt: Prompt) -> None:
        """Sends ``info`` once the prompt is read (event loop)."""
        self.output.put_item(info)

    def accept(self, submission: Submission, info: ModelInfo) -> None:
        """Takes over the prompt and the slot, and creates the sampler (device thread)."""
        read = submission.read
        self.slot, self.held = submission.slot, submission.held
        self.submitted_ns = submission.submitted_ns
        self.prompt, self.rows = read.prompt, read.rows
        self.core.set_max_tokens(read.max_tokens)
        self.sampler = TokenSampler(
            self.request.sampling,
            read.prompt.input_ids,
            info.num_token_ids,
            info.device,
            end_token_ids=self.request.end_token_ids,
            masks=read.masks,
            proposes=self.proposes,
            sharpness=self.sharpness,
        )

    @abstractmethod
    def begin_prefill(self, host: SequenceHost) -> None:
        """Starts the first job (device thread)."""

    def run_tower(
        self, host: SequenceHost, *, is_needed: bool = True
    ) -> Generator[None, None, torch.Tensor | None]:
        """Runs the vision tower in pieces if ``is_needed``, and returns its output; frees the
        pixels, which nothing needs any more (device thread). ``help`` gets each piece."""
        prompt, self.prompt = self.prompt, self.prompt.without_pixels()
        if not is_needed:
            return None
        before_ns = self.device_ns
        self.stages.tower_began_ns = perf_counter_ns() if prompt.items else 0
        pieces = host.model.embed_pieces(prompt, host.vision_cache)
        while True:
            try:
                rows = next(pieces)
            except StopIteration as end:
                visual: torch.Tensor | None = end.value
                break
            if self.help is not None:
                self.help.add_features(rows)
            yield
        self.stages.tower_ended_ns = perf_counter_ns()
        self.vision_ns = self.device_ns - before_ns
        return visual

    def run_prefill(
        self,
        pieces: Iterable[torch.Tensor | None],
        *,
        after_piece: Callable[[], object] = lambda: None,
    ) -> Generator[None, None, torch.Tensor]:
        """Runs the pieces of a model's prefill, and ``after_piece`` after each but the last;
        returns the logits (device thread)."""
        self.stages.prefill_began_ns = perf_counter_ns()
        logits = None
        for logits in pieces:
            if logits is None:
                after_piece()
                yield
        assert logits is not None, "a prefill ends with logits"
        return logits

    @property
    def device_ns(self) -> int:
        """Device time of the sequence's jobs in ns; only inside one of their pieces."""
        return self.job_ns + perf_counter_ns() - self.piece_began_ns

    def close(self) -> None:
        """Marks the sequence as ended (device thread); a subclass also frees what it holds."""
        self.is_closed = True

    def receive_message(self, host: SequenceHost, message: Any) -> None:
        """Handles a message; raises HippoError for an invalid one (device thread)."""
        self.core.receive(message)

    def time_step(self, step: Step, plan: StepPlan, *, began_ns: int, ended_ns: int) -> Timing:
        """Returns the times since the end of the last step; ``plan`` describes the forward."""
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

    def held_at_end(self, fed_ids: Sequence[int]) -> CachedRows:
        """Returns the slot's rows at the end of the sequence; ``fed_ids`` are the leading
        completion ids whose keys and values are cached."""
        return self.held.followed_by(fed_ids, self.prompt.next_position) if fed_ids else self.held

    def take_wait_ns(self) -> int:
        """Returns the device's idle time since the last call, in ns."""
        wait_ns, self.wait_ns = self.wait_ns, 0
        return wait_ns
