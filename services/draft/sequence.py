"""A sequence of the draft service: the vision tower runs first, the prefill after the selection."""

from typing import Any

import torch

from hippo.engine.sequence import EngineSequence, Job, SequenceHost
from hippo.engine.slots import SlotPool
from hippo.errors import InvalidRequestError
from hippo.models.interface.base import Prompt
from hippo.models.interface.content import cached_places, compacted
from hippo.speculation.drafter import Drafter
from hippo.speculation.sharpness import SharpnessByTemperature
from hippo.types import Hold, OpenRequest, Selection
from services.draft.room import FeatureRoom


class DraftSequence(EngineSequence):
    """One sequence and its drafter."""

    sends_prefill_timing = True
    proposes = True

    def __init__(
        self,
        request: OpenRequest,
        slots: SlotPool,
        *,
        max_guessed: int,
        room: FeatureRoom,
        sharpnesses: SharpnessByTemperature,
    ) -> None:
        self.sharpness = sharpnesses.at(request.sampling.temperature)
        self.drafter = Drafter(
            max_tokens=request.max_tokens,
            end_token_ids=request.end_token_ids,
            pace=request.pace,
            committed_ids=request.committed_ids,
            epoch=request.epoch,
            max_guessed=0 if request.without_guesses else max_guessed,
            sharpness=self.sharpness,
        )
        super().__init__(request, slots, self.drafter)
        self.selection: Selection | None = None
        self.visual: torch.Tensor | None = None
        self.is_embedded = False
        self._room = room

    def begin_prefill(self, host: SequenceHost) -> None:
        if self.selection is not None:
            host.start_job(self, self._embed(host))
            return
        self._room.enter(
            self,
            sum(int(item.places.shape[0]) for item in self.prompt.items),
            lambda: host.start_job(self, self._embed(host)),
            capacity=host.model.info.max_context_length,
        )

    def close(self) -> None:
        super().close()
        self._room.leave(self)
        self.visual = None

    def receive_message(self, host: SequenceHost, message: Any) -> None:
        if isinstance(message, Hold):
            self.is_paused = self.selection is None
            return
        if not isinstance(message, Selection):
            super().receive_message(host, message)
            return
        if self.selection is not None:
            raise InvalidRequestError("select came twice; it is sent once", param="select")
        self.selection, self.is_paused = message, False
        if self.is_embedded:
            host.start_job(self, self._prefill(host, message))
        elif self._room.skip_queue(self):
            host.start_job(self, self._embed(host))

    def _embed(self, host: SequenceHost) -> Job:
        """Runs the vision tower; if the selection has come, also the prefill in the same job, so
        that no more features wait than the room holds."""
        self.visual = yield from self.run_tower(host)
        self.is_embedded = True
        if self.selection is not None:
            yield from self._prefill(host, self.selection)

    def _kept(self, selection: Selection) -> torch.Tensor | None:
        """Returns the visual tokens to cache, None for all; raises InvalidRequestError for a
        selection about other frames."""
        num_visual = int(self.prompt.visual_indices.shape[0])
        if selection.num_visual_tokens != num_visual:
            raise InvalidRequestError(
                f"select is about {selection.num_visual_tokens} visual tokens, but the prompt has "
                f"{num_visual} here: draft and target see different frames",
                param="select.num_visual_tokens",
            )
        if len(selection.kept_indices) == num_visual:
            return None
        return torch.tensor(selection.kept_indices, dtype=torch.int64)

    def _prefill(self, host: SequenceHost, selection: Selection) -> Job:
        self._room.leave(self)
        kept = self._kept(selection)
        if kept is not None and self.request.pruning.compacted_positions:
            self.prompt = compacted(self.prompt, kept)
            self.rows = self.rows.moved(self.prompt.positions)
        wait_ns = self.take_wait_ns()
        rows = self.rows.at(cached_places(self.prompt, kept))
        num_reused = host.take_over_rows(self, rows)
        pieces = host.model.prefill(
            self.slot, self.prompt, self.visual, kept, num_reused=num_reused
        )
        self.visual = None
        logits = yield from self.run_prefill(pieces)
        self.drafter.set_prompt_text(text_ids(self.prompt))
        host.finish_prefill(self, logits, rows=rows, num_reused=num_reused, wait_ns=wait_ns)


def text_ids(prompt: Prompt) -> list[int]:
    """Returns the prompt's ids without the placeholders of prunable visual tokens."""
    is_text = torch.ones(prompt.length, dtype=torch.bool)
    is_text[prompt.visual_indices] = False
    ids: list[int] = torch.as_tensor(prompt.input_ids)[is_text].tolist()
    return ids
