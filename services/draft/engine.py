"""The draft's device work: prefill on the selected visual tokens, then one step after another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hippo.engine.base import Engine
from hippo.engine.jobs import Job
from hippo.engine.sequence import EngineSequence
from hippo.engine.slots import Reservation
from hippo.errors import InvalidRequestError
from hippo.models.base import Prompt
from hippo.models.content import cached_places
from hippo.sampling import SampleRequest, TokenSampler, sample_step
from hippo.speculation.drafter import Drafter, DraftStep
from hippo.speculation.step_mean import StepMean
from hippo.transfer import to_device
from hippo.types import Commit, OpenRequest, Pace, Selection, Timing


class DraftSequence(EngineSequence):
    """One sequence and its drafter."""

    visual: torch.Tensor | None

    def __init__(
        self, request: OpenRequest, reservation: Reservation, *, max_guessed: int = 0
    ) -> None:
        super().__init__(request, reservation)
        self.drafter = Drafter(
            max_tokens=request.max_tokens,
            end_token_ids=request.end_token_ids,
            pace=request.pace,
            committed_ids=request.committed_ids,
            epoch=request.epoch,
            max_guessed=max_guessed,
        )
        self.has_select = False  # the event loop's: select arrived on the stream
        self.selection: Selection | None = None
        self.is_embedded = False
        self.has_begun = False
        self.step_mean = StepMean()


class DraftEngine(Engine[DraftSequence, DraftStep]):
    """Proposes tokens: the vision tower runs at once, the rest when the selection is there."""

    def _begin(self, sequence: DraftSequence) -> None:
        sequence.drafter.set_max_tokens(sequence.max_tokens)
        sequence.sampler = TokenSampler(
            sequence.request.sampling,
            sequence.prompt.input_ids,
            self.model.info.num_token_ids,
            self._device,
            end_token_ids=sequence.request.end_token_ids,
        )
        self._start_job(sequence, self._embed(sequence))

    def _take_message(self, sequence: DraftSequence, message: Any) -> None:
        if isinstance(message, Commit):
            sequence.drafter.add_commit(message)
        elif isinstance(message, Pace):
            sequence.drafter.set_pace(message)
        else:
            assert isinstance(message, Selection)
            sequence.selection = message
            self._prefill_if_ready(sequence)
            return
        self._offer_block(sequence)

    def _embed(self, sequence: DraftSequence) -> Job:
        sequence.began_ns = self._jobs.piece_began_ns
        sequence.visual = self.model.embed_visual(sequence.prompt, self.vision_cache)
        sequence.is_embedded = True
        self._prefill_if_ready(sequence)
        yield None

    def _prefill_if_ready(self, sequence: DraftSequence) -> None:
        selection = sequence.selection
        if not sequence.is_embedded or selection is None:
            return
        num_visual = int(sequence.prompt.visual_indices.shape[0])
        if selection.num_visual_tokens != num_visual:
            raise InvalidRequestError(
                f"select is about {selection.num_visual_tokens} visual tokens, but the prompt has "
                f"{num_visual} here: draft and target see different frames",
                param="select.num_visual_tokens",
            )
        kept = None
        if len(selection.kept_indices) < num_visual:
            kept = torch.tensor(selection.kept_indices, dtype=torch.int64)
        self._start_job(sequence, self._prefill(sequence, kept))

    def _prefill(self, sequence: DraftSequence, kept: torch.Tensor | None) -> Job:
        prompt, visual = sequence.prompt, sequence.visual
        sequence.visual = None
        wait_ns = sequence.take_wait_ns()
        rows = sequence.rows.at(cached_places(prompt, kept))
        num_reused = self._take_over(sequence, rows)
        for logits in self.model.prefill(
            sequence.slot, prompt, visual, kept, num_reused=num_reused
        ):
            if logits is None:
                yield None
            else:
                token_id = sequence.sampler.sample(logits[None], first_index=0, output_ids=())[0]
        sequence.held = rows
        self.counters.count_prefill(len(rows), num_reused)
        timing = Timing(
            queue_ns=sequence.began_ns - sequence.submitted_ns,
            forward_ns=self._jobs.device_ns(sequence),
            wait_ns=wait_ns,
            num_rows=len(rows) - num_reused,
            context_length=num_reused,
        )
        self._emit(sequence, timing)
        sequence.drafter.begin(token_id, text_ids(prompt))
        sequence.has_begun = True
        self._offer_block(sequence)

    def _fed_ids(self, sequence: DraftSequence) -> Sequence[int]:
        return sequence.drafter.fed_ids

    def _schedule(self, now_ns: int) -> tuple[list[tuple[DraftSequence, DraftStep]], int | None]:
        steps: list[tuple[DraftSequence, DraftStep]] = []
        for sequence in self._sequences:
            step = sequence.drafter.next_step()
            if step is not None:
                steps.append((sequence, step))
        return steps, None

    def _sample(
        self, steps: Sequence[tuple[DraftSequence, DraftStep]], logits: torch.Tensor
    ) -> list[list[int]]:
        num_rows = [step.num_guessed + 1 for _, step in steps]
        if logits.shape[0] != sum(num_rows):  # only the last rows of each are of use
            ends = itertools.accumulate(len(step.token_ids) for _, step in steps)
            used = [
                row
                for end, count in zip(ends, num_rows, strict=True)
                for row in range(end - count, end)
            ]
            logits = logits.index_select(0, to_device(used, logits.device))
        requests = [
            SampleRequest(
                sequence.sampler, step.first_index, sequence.drafter.history(step), step.guess
            )
            for sequence, step in steps
        ]
        return sample_step(requests, logits, num_rows=num_rows)

    def _finish(
        self,
        sequence: DraftSequence,
        step: DraftStep,
        token_ids: list[int],
        began_ns: int,
        ended_ns: int,
    ) -> int:
        num_drafted = sequence.drafter.finish_step(step, token_ids)
        num_settled = len(step.token_ids) - step.num_guessed
        sequence.step_mean.observe(
            ended_ns - began_ns, num_drafted=num_drafted, num_settled=num_settled
        )
        self._offer_block(sequence)
        return num_drafted

    def _offer_block(self, sequence: DraftSequence) -> None:
        if not sequence.has_begun:
            return
        block = sequence.drafter.take_block(sequence.step_mean.token_ns, sequence.wait_ns)
        if block is not None:
            sequence.wait_ns = 0
            self._emit(sequence, block)


def text_ids(prompt: Prompt) -> list[int]:
    """The prompt's ids without those that stand for prunable visual tokens."""
    is_text = torch.ones(prompt.length, dtype=torch.bool)
    is_text[prompt.visual_indices] = False
    ids: list[int] = torch.as_tensor(prompt.input_ids)[is_text].tolist()
    return ids
