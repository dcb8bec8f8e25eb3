"""The events of a stream with ``return_events``: what each service did, as it happens;
gateway/answer/event_schemas.py declares each event."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

from gateway.answer import event_schemas as schemas
from gateway.answer.figures import ms, shown_media
from gateway.answer.text import CompletionReader
from gateway.pairs.token_bytes import TokenBytes
from hippo.types import (
    Block,
    FinishReason,
    MediaUse,
    PromptInfo,
    Pruning,
    Selection,
    Timing,
    Verdict,
)


class EventLog:
    """Collects the events of one completion; ``on_event`` is called after each one."""

    def __init__(self, tokens: TokenBytes, received_ns: int, on_event: Callable[[], None]) -> None:
        self._reader = CompletionReader(tokens)
        self._received_ns = received_ns
        self._on_event = on_event
        self._events: list[dict[str, Any]] = []  # not yet taken
        self._num_blocks = 0
        self._num_verdicts = 0
        self._epoch = 0
        # Draft tokens, without their text: by completion index, and those of branches also by id.
        self._proposed: dict[int, schemas.EventToken] = {}
        self._branched: dict[tuple[int, int], schemas.EventToken] = {}

    def take_events(self) -> tuple[dict[str, Any], ...]:
        """Returns the events since the last call."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def add_prompt(self, service: schemas.Service, info: PromptInfo, now_ns: int) -> None:
        if service == "target":
            self._reader.is_thinking = info.is_thinking
        event = schemas.PromptEvent(
            type="prompt",
            at=self._at(now_ns),
            service=service,
            queue=ms(info.queue_ns),
            preprocess=ms(info.preprocess_ns),
            num_prompt_tokens=info.num_prompt_tokens,
            num_visual_tokens=info.num_visual_tokens,
            media=[_seen(item) for item in info.media],
        )
        self._add(event)

    def add_selection(self, selection: Selection, pruning: Pruning, now_ns: int) -> None:
        event = schemas.SelectionEvent(
            type="selection",
            at=self._at(now_ns),
            strategy=pruning.strategy.value,
            ratio=pruning.ratio,
            score=ms(selection.score_ns),
            num_visual_tokens=selection.num_visual_tokens,
            kept=list(selection.kept_indices),
        )
        self._add(event)

    def add_draft_prefill(self, timing: Timing, now_ns: int) -> None:
        times = {**_device_times(timing), "vision": ms(timing.vision_ns)}
        self._add(schemas.PrefillEvent(type="draft_prefill", at=self._at(now_ns), **times))

    def add_draft_loss(self, problem: str, now_ns: int) -> None:
        self._add(schemas.DraftLossEvent(type="draft_loss", at=self._at(now_ns), problem=problem))

    def add_block(self, block: Block, now_ns: int) -> None:
        is_stale = block.epoch < self._epoch
        places = itertools.count()
        for index, token_id in enumerate(block.token_ids, block.start_index):
            proposal = self._proposal(block, index, token_id, next(places))
            if not is_stale:
                self._proposed[index] = proposal
        for branch in block.branches:
            for index, token_id in enumerate(branch.token_ids[1:], branch.index + 1):
                proposal = self._proposal(block, index, token_id, next(places))
                self._branched[index, token_id] = proposal
        event = schemas.BlockEvent(
            type="block",
            at=self._at(now_ns),
            block=self._num_blocks,
            index=block.start_index,
            token_ids=list(block.token_ids),
            guessed_places=list(block.guessed_places),
            branches=[list(branch.token_ids) for branch in block.branches],
            is_stale=is_stale,
            step=ms(block.step_ns),
            wait=ms(block.wait_ns),
        )
        self._num_blocks += 1
        self._add(event)

    def add_verdict(self, verdict: Verdict, now_ns: int, *, num_tokens: int) -> None:
        """Records a forward of the target, after which the answer has ``num_tokens`` tokens; the
        tokens behind them were settled after a stop string, and are left out."""
        timing = verdict.timing
        times, fields = _device_times(timing), schemas.VerdictEvent.model_fields
        if verdict.start_index == 0:
            times["vision"] = ms(timing.vision_ns)
            times["helper"] = ms(timing.helper_ns)
            times["helper_wait"] = ms(timing.helper_wait_ns)
        count = max(num_tokens - verdict.start_index, 0)
        self._epoch = max(self._epoch, verdict.epoch)
        event = schemas.VerdictEvent(
            type="verdict",
            at=self._at(now_ns),
            forward_number=self._num_verdicts,
            mode=_mode(verdict),
            between=ms(timing.queue_ns),
            rows=timing.num_rows,
            num_sequences=timing.num_sequences,
            **{name: getattr(verdict, name) for name in fields if hasattr(verdict, name)},
            tokens=[
                self._token(verdict, place, is_last=place + 1 == count)
                for place in range(min(count, len(verdict.token_ids)))
            ],
            **times,
        )
        self._num_verdicts += 1
        self._add(event)

    def _proposal(self, block: Block, index: int, token_id: int, place: int) -> schemas.EventToken:
        source: Literal["guess", "draft"] = "guess" if place in block.guessed_places else "draft"
        return schemas.EventToken(
            id=token_id, text="", index=index, source=source, block=self._num_blocks, place=place
        )

    def _token(self, verdict: Verdict, place: int, *, is_last: bool) -> schemas.EventToken:
        index, token_id = verdict.start_index + place, verdict.token_ids[place]
        is_end = verdict.finish_reason is FinishReason.STOP and place + 1 == len(verdict.token_ids)
        thinks = self._reader.is_thinking
        text, is_thought = ("", thinks) if is_end else self._reader.add_token(token_id)
        if is_last and verdict.finish_reason is not None:
            text += self._reader.flush_text()
        told: dict[str, Any] = {"text": text, **({"is_thought": True} if is_thought else {})}
        proposal = self._proposed.pop(index, None)
        if place >= verdict.num_accepted_tokens + verdict.num_accepted_reused:
            return schemas.EventToken(id=token_id, index=index, source="target", **told)
        if proposal is None or proposal.id != token_id:
            proposal = self._branched.get((index, token_id))
        if proposal is None:
            return schemas.EventToken(id=token_id, index=index, source="draft", **told)
        return proposal.model_copy(update=told)

    def _at(self, now_ns: int) -> float:
        return ms(now_ns - self._received_ns)

    def _add(self, event: schemas.StreamEvent) -> None:
        self._events.append(event.model_dump(exclude_unset=True))
        self._on_event()


def _device_times(timing: Timing) -> dict[str, Any]:
    return {
        "forward": ms(timing.forward_ns),
        "wait": ms(timing.wait_ns),
        "context": timing.context_length,
    }


def _mode(verdict: Verdict) -> Literal["prefill", "optimistic", "conservative", "target_only"]:
    if verdict.start_index == 0:
        return "prefill"
    if verdict.num_draft_tokens + verdict.num_reused_tokens == 0:
        return "target_only"
    return "conservative" if verdict.is_conservative else "optimistic"


def _seen(item: MediaUse) -> schemas.SeenMedia:
    seconds = [round(second, 3) for second in item.frame_seconds]
    shown = shown_media(item)
    return schemas.SeenMedia(**shown, grid=list(item.visual_grid), frame_seconds=seconds)
