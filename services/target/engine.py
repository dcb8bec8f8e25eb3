"""The target's device work: prefill, then verification steps of all sequences together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from hippo.engine.base import Engine
from hippo.engine.jobs import Job
from hippo.engine.sequence import EngineSequence
from hippo.engine.settings import NO_REUSE, ReuseOptions
from hippo.engine.slots import Reservation
from hippo.errors import ModelLoadError
from hippo.models.base import VideoLanguageModel
from hippo.models.content import has_visual_from
from hippo.pruning.select import (
    DEFAULT_OPTIONS,
    SelectionOptions,
    default_score_layers,
    needs_features,
)
from hippo.sampling import SampleRequest, TokenSampler, sample_step, sample_with_logprobs
from hippo.speculation.verifier import Verifier, VerifyStep, Wait
from hippo.types import Block, OpenRequest, Pace, Timing, TokenLogprobs, Verdict
from services.target.selection import ScoredSelection, needs_scores


class TargetSequence(EngineSequence):
    """One sequence and its verifier."""

    def __init__(self, request: OpenRequest, reservation: Reservation) -> None:
        super().__init__(request, reservation)
        self.verifier = Verifier(
            max_tokens=request.max_tokens,
            end_token_ids=request.end_token_ids,
            pace=request.pace,
        )
        self.ready_ns = 0  # end of its last step
        self.logprobs: list[TokenLogprobs] = []  # of the rows of its last step, if asked for


class TargetEngine(Engine[TargetSequence, VerifyStep]):
    """Settles tokens; a sequence that waits for its draft holds up no other.

    The first ``score_layers`` layers score visual tokens (None: half of the model's), and
    ``options`` say how they are chosen by their scores.
    """

    def __init__(
        self,
        model: VideoLanguageModel,
        *,
        on_failure: Callable[[Exception], None],
        reuse: ReuseOptions = NO_REUSE,
        score_layers: int | None = None,
        options: SelectionOptions = DEFAULT_OPTIONS,
    ) -> None:
        super().__init__(model, on_failure=on_failure, reuse=reuse)
        if score_layers is not None and score_layers > model.num_layers:
            raise ModelLoadError(
                f"--score-layers is {score_layers}, but {model.info.name} has {model.num_layers}"
            )
        self._score_layers = score_layers or default_score_layers(model.num_layers)
        self._options = options

    def _begin(self, sequence: TargetSequence) -> None:
        sequence.verifier.set_max_tokens(sequence.max_tokens)
        sequence.sampler = TokenSampler(
            sequence.request.sampling,
            sequence.prompt.input_ids,
            self.model.info.num_token_ids,
            self._device,
            end_token_ids=sequence.request.end_token_ids,
        )
        self._start_job(sequence, self._prefill(sequence))

    def _take_message(self, sequence: TargetSequence, message: Any) -> None:
        if isinstance(message, Block):
            sequence.verifier.add_block(message)
        else:
            assert isinstance(message, Pace)
            sequence.verifier.set_pace(message)

    def _prefill(self, sequence: TargetSequence) -> Job:
        prompt, pruning = sequence.prompt, sequence.request.pruning
        queue_ns = self._jobs.piece_began_ns - sequence.submitted_ns
        is_scored = needs_scores(pruning, int(prompt.visual_indices.shape[0]))
        # Scores need the question's queries: its rows are run, wherever they stand.
        most = int(prompt.question_indices[0]) if is_scored else None
        num_reused = self._take_over(sequence, sequence.rows, most=most)
        visual = None
        if has_visual_from(prompt, num_reused) or (is_scored and needs_features(pruning.strategy)):
            visual = self.model.embed_visual(prompt, self.vision_cache)
        selection = tap = None
        if is_scored:
            selection = ScoredSelection(
                pruning,
                prompt,
                visual,
                score_layers=self._score_layers,
                options=self._options,
            )
            tap = selection.tap
        logits = None
        tell = partial(self._tell_selection, sequence, selection)
        yield None
        for logits in self.model.prefill(sequence.slot, prompt, visual, None, tap, num_reused):
            if logits is None:
                tell()
                yield None
        assert logits is not None
        tell(is_last=True)
        first = SampleRequest(sequence.sampler, 0, ())
        token_id = _sample([sequence], [first], logits[None], [1])[0][0]
        sequence.held = sequence.rows
        self.counters.count_prefill(prompt.length, num_reused)
        self._receive(0)
        if sequence.is_closed:
            return
        sequence.ready_ns = perf_counter_ns()
        timing = Timing(
            queue_ns=queue_ns,
            forward_ns=self._jobs.device_ns(sequence),
            num_rows=prompt.length - num_reused,
            context_length=num_reused,
        )
        self._tell(sequence, sequence.verifier.begin(token_id, timing))

    def _fed_ids(self, sequence: TargetSequence) -> Sequence[int]:
        # The last settled id is fed by the next step.
        return sequence.verifier.committed_ids[:-1]

    def _tell_selection(
        self, sequence: TargetSequence, selection: ScoredSelection | None, *, is_last: bool = False
    ) -> None:
        message = None if selection is None else selection.take(is_last=is_last)
        if message is not None:
            self._emit(sequence, message)

    def _schedule(self, now_ns: int) -> tuple[list[tuple[TargetSequence, VerifyStep]], int | None]:
        steps: list[tuple[TargetSequence, VerifyStep]] = []
        until_ns: int | None = None
        for sequence in self._sequences:
            step = sequence.verifier.next_step(now_ns)
            if isinstance(step, Wait):
                until_ns = step.until_ns if until_ns is None else min(until_ns, step.until_ns)
            elif step is not None:
                steps.append((sequence, step))
        return steps, until_ns

    def _sample(
        self, steps: Sequence[tuple[TargetSequence, VerifyStep]], logits: torch.Tensor
    ) -> list[list[int]]:
        requests = [
            SampleRequest(
                sequence.sampler,
                step.start_index + 1,
                sequence.verifier.committed_ids,
                step.token_ids[1:],
            )
            for sequence, step in steps
        ]
        num_rows = [len(step.token_ids) for _, step in steps]
        return _sample([sequence for sequence, _ in steps], requests, logits, num_rows)

    def _finish(
        self,
        sequence: TargetSequence,
        step: VerifyStep,
        token_ids: list[int],
        began_ns: int,
        ended_ns: int,
    ) -> int:
        wait_ns = sequence.take_wait_ns()
        timing = Timing(
            queue_ns=max(began_ns - sequence.ready_ns - wait_ns, 0),
            forward_ns=ended_ns - began_ns,
            wait_ns=wait_ns,
            num_rows=len(step.token_ids),
            context_length=sequence.prompt.length + step.start_index,
            num_sequences=self._num_stepped,
            num_batch_rows=self._num_stepped_rows,
        )
        sequence.ready_ns = ended_ns
        verdict = sequence.verifier.finish_step(step, token_ids, timing)
        self._tell(sequence, verdict)
        return len(verdict.token_ids)

    def _tell(self, sequence: TargetSequence, verdict: Verdict) -> None:
        if sequence.logprobs:
            settled = sequence.logprobs[: len(verdict.token_ids)]
            verdict = replace(verdict, logprobs=tuple(settled))
        self._emit(sequence, verdict)
        if verdict.finish_reason is not None:
            self._close(sequence)


def _sample(
    sequences: Sequence[TargetSequence],
    requests: Sequence[SampleRequest],
    logits: torch.Tensor,
    num_rows: Sequence[int],
) -> list[list[int]]:
    """Tokens of all rows; a sequence that asked for log-probabilities has those of its rows."""
    num_top = [sequence.request.num_top_logprobs for sequence in sequences]
    if all(wanted is None for wanted in num_top):
        return sample_step(requests, logits, num_rows=num_rows)
    token_ids, logprobs = sample_with_logprobs(requests, logits, num_rows=num_rows, num_top=num_top)
    for sequence, found in zip(sequences, logprobs, strict=True):
        sequence.logprobs = found
    return token_ids
