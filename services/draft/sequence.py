"""A sequence of the draft service: the vision tower runs first, the prefill after the selection."""

from __future__ import annotations

from typing import Any

import torch

from hippo.engine.engine import Engine
from hippo.engine.jobs import Job
from hippo.engine.sequence import EngineSequence
from hippo.engine.slots import SlotPool
from hippo.errors import InvalidRequestError
from hippo.models.base import Prompt
from hippo.models.content import cached_places
from hippo.speculation.drafter import Drafter
from hippo.types import OpenRequest, Selection


class DraftSequence(EngineSequence):
    """One sequence and its drafter."""

    sends_prefill_timing = True
    visual: torch.Tensor | None

    def __init__(self, request: OpenRequest, slots: SlotPool, *, max_guessed: int) -> None:
        self.drafter = Drafter(
            max_tokens=request.max_tokens,
            end_token_ids=request.end_token_ids,
            pace=request.pace,
            committed_ids=request.committed_ids,
            epoch=request.epoch,
            max_guessed=max_guessed,
        )
        super().__init__(request, slots, self.drafter)
        self.selection: Selection | None = None
        self.is_embedded = False

    def begin_prefill(self, engine: Engine) -> None:
        engine.start_job(self, self._embed(engine))

    def receive_message(self, engine: Engine, message: Any) -> None:
        if isinstance(message, Selection):
            if self.selection is not None:
                raise InvalidRequestError("select came twice; it is sent once", param="select")
            self.selection = message
            self._prefill_if_ready(engine)
        else:
            super().receive_message(engine, message)

    def _embed(self, engine: Engine) -> Job:
        self.began_ns = engine.jobs.piece_began_ns
        self.visual = engine.model.embed_visual(self.prompt, engine.vision_cache)
        self.is_embedded = True
        self._prefill_if_ready(engine)
        yield None

    def _prefill_if_ready(self, engine: Engine) -> None:
        selection = self.selection
        if not self.is_embedded or selection is None:
            return
        num_visual = int(self.prompt.visual_indices.shape[0])
        if selection.num_visual_tokens != num_visual:
            raise InvalidRequestError(
                f"select is about {selection.num_visual_tokens} visual tokens, but the prompt has "
                f"{num_visual} here: draft and target see different frames",
                param="select.num_visual_tokens",
            )
        kept = None
        if len(selection.kept_indices) < num_visual:
            kept = torch.tensor(selection.kept_indices, dtype=torch.int64)
        engine.start_job(self, self._prefill(engine, kept))

    def _prefill(self, engine: Engine, kept: torch.Tensor | None) -> Job:
        visual, self.visual = self.visual, None
        wait_ns = self.take_wait_ns()
        rows = self.rows.at(cached_places(self.prompt, kept))
        num_reused = engine.take_over_rows(self, rows)
        logits = None
        for logits in engine.model.prefill(
            self.slot, self.prompt, visual, kept, num_reused=num_reused
        ):
            if logits is None:
                yield None
        assert logits is not None, "a prefill ends with logits"
        self.drafter.set_prompt_text(text_ids(self.prompt))
        engine.finish_prefill(
            self,
            logits,
            rows=rows,
            num_reused=num_reused,
            queue_ns=self.began_ns - self.submitted_ns,
            wait_ns=wait_ns,
        )


def text_ids(prompt: Prompt) -> list[int]:
    """Returns the prompt's ids without the placeholders of prunable visual tokens."""
    is_text = torch.ones(prompt.length, dtype=torch.bool)
    is_text[prompt.visual_indices] = False
    ids: list[int] = torch.as_tensor(prompt.input_ids)[is_text].tolist()
    return ids
