"""The steps of one forward: the masks before it, and the sampling of all tokens after it with one
wait for the device."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hippo.engine.sequence import EngineSequence
from hippo.models.interface.transfer import to_device
from hippo.sampling.sampler import RowNotes, SampleRequest, sample_step
from hippo.speculation.core import Step, Wait


class Work(NamedTuple):
    """A sequence's part of a forward."""

    sequence: EngineSequence
    step: Step


class SlowMasks:
    """Steps that join a forward when their masks are there; only the device thread uses it.

    Masks are computed while the forward runs, as many as will probably be there at its end. The
    steps of all others wait, so that a slow grammar delays no other sequence.
    """

    def __init__(self, on_ready: Callable[[], object]) -> None:
        """``on_ready`` is called by another thread when a step can join a forward."""
        self._on_ready = on_ready
        self._steps: dict[EngineSequence, Step] = {}
        self._room_ns = 0.0

    def begin_forward(self, forward_ns: float) -> None:
        """Steps are collected for a forward that will take about so long."""
        self._room_ns = forward_ns

    def next_step(self, sequence: EngineSequence, now_ns: int) -> Step | Wait | None:
        """Returns the core's next step when its masks are ready, or will be after the forward."""
        if (waiting := self._steps.get(sequence)) is not None:
            masks = sequence.sampler.masks
            assert masks is not None
            if not masks.are_ready:
                return None
            del self._steps[sequence]
            return waiting
        step = sequence.core.next_step(now_ns)
        if isinstance(step, Step) and (masks := sequence.sampler.masks) is not None:
            if masks.expected_ns > self._room_ns:
                self._steps[sequence] = step
                masks.start(sequence.core.history(step), step.guess, on_ready=self._on_ready)
                return None
            self._room_ns -= masks.expected_ns
        return step

    def forget(self, sequence: EngineSequence) -> None:
        self._steps.pop(sequence, None)


def start_masks(steps: Sequence[Work]) -> None:
    """Starts the masks that are not started, which are computed beside the forward."""
    for sequence, step in steps:
        masks = sequence.sampler.masks
        if masks is not None and not masks.are_started:
            masks.start(sequence.core.history(step), step.guess)


def sample_steps(steps: Sequence[Work], logits: torch.Tensor) -> list[tuple[list[int], RowNotes]]:
    """Returns each step's tokens, one per used row, and the notes of these rows.

    ``logits`` ``[rows, vocabulary]`` cover all rows of the forward, or only the used rows.
    """
    if logits.shape[0] != sum(step.num_guessed + 1 for _, step in steps):
        ends = itertools.accumulate(len(step.token_ids) for _, step in steps)
        used = [
            row
            for end, (_, step) in zip(ends, steps, strict=True)
            for row in range(end - step.num_guessed - 1, end)
        ]
        logits = logits.index_select(0, to_device(used, logits.device))
    requests = [
        SampleRequest(
            sequence.sampler, sequence.core.history(step), step.guess, sequence.num_top_logprobs
        )
        for sequence, step in steps
    ]
    return sample_step(requests, logits)
