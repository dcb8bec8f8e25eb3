"""A draft model that misbehaves as a :class:`tests.support.running.faults.DraftFault` says."""

from __future__ import annotations

import time
from collections.abc import Generator

import torch

from hippo.models.interface.base import (
    AttentionTap,
    DelegatingModel,
    Prompt,
    StepPlan,
    VideoLanguageModel,
)
from tests.support.running.faults import DraftFault


class FaultyModel(DelegatingModel):
    """Wraps a model and adds a fault. A slow step runs several times, so it keeps the processor
    busy; a stall sleeps; a wrong token is the second best one."""

    def __init__(self, model: VideoLanguageModel, fault: DraftFault) -> None:
        super().__init__(model)
        self._fault = fault
        self._began_s: float | None = None  # start of the answer's first step

    def prefill(
        self,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        tap: AttentionTap | None = None,
        num_reused: int = 0,
    ) -> Generator[torch.Tensor | None]:
        """Runs the model's prefill without delays; only its token can be wrong."""
        for logits in self._model.prefill(slot, prompt, visual, kept, tap, num_reused):
            if logits is not None and self._fault.is_wrong_at(0):
                logits = _without_best(logits[None])[0]
            yield logits
        self._began_s = None

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Returns the model's logits, delayed and changed by the fault."""
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s
        elapsed_ms = 1e3 * (now_s - self._began_s)
        time.sleep(self._fault.stall_ms(elapsed_ms) / 1e3)
        until_s = time.perf_counter()
        began_s = until_s
        logits = self._model.forward(plan)
        until_s += self._fault.factor(elapsed_ms) * (time.perf_counter() - began_s)
        while time.perf_counter() < until_s:
            self._model.forward(plan)
        indices = [
            sequence.start_index + row + 1
            for sequence in plan.sequences
            for row in range(len(sequence.token_ids))
        ]
        wrong = [row for row, index in enumerate(indices) if self._fault.is_wrong_at(index)]
        if wrong:
            rows = torch.tensor(wrong, device=logits.device)
            return logits.index_copy(0, rows, _without_best(logits[rows]))
        return logits


def _without_best(logits: torch.Tensor) -> torch.Tensor:
    """Returns a copy of logits ``[rows, ids]`` with each row's highest set to -inf."""
    return logits.scatter(-1, logits.argmax(-1, keepdim=True), -torch.inf)
