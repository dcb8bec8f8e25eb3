"""What model families share: slots, prefill by layer groups and chunks, forward, rotary tables."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns

import torch

from hippo.errors import ContextLengthError
from hippo.models.attention import ChunkMask, QueryTap, SequenceStep, Step, plan_sequence
from hippo.models.base import (
    AttentionTap,
    DecodedMedia,
    FeatureCache,
    Prompt,
    PromptTail,
    Scope,
    SequenceRows,
    StepPlan,
)
from hippo.models.batch import BatchStep, PlacedRows, plan_batch, worth_batching
from hippo.models.content import cached_places
from hippo.models.linear import make_linear, padded_rows
from hippo.models.pretrained import Pretrained
from hippo.pruning.scores import attention_scores
from hippo.sizes import CHUNK_ROWS as _CHUNK_ROWS
from hippo.types import ChatMessage, FramePlan, ModelInfo

_LEAST_LAYER_GROUPS = 8  # of a prefill, which can be left between two of their chunks
_GROUP_ROWS = 256  # prompt rows for which that many groups are short enough


@dataclass(frozen=True, slots=True)
class _Slot:
    """What a filled slot remembers of its prompt."""

    prompt_length: int  # cached tokens, the dropped ones not counted
    next_position: int


class CachedModel(ABC):
    """A loaded checkpoint with its key-value cache; see VideoLanguageModel.

    A family adds ``prepare`` and ``embed_item``, and ``visual_places`` and ``embed_others`` where
    there are more visual rows than those of items. ``num_axes`` is that of its positions.
    """

    def __init__(self, pretrained: Pretrained, *, num_axes: int) -> None:
        self.model = pretrained.model
        self._stack = pretrained.stack
        self._cache = pretrained.cache
        self._info = pretrained.info
        self._static = pretrained.static
        self._compiled = pretrained.compiled
        self._num_axes = num_axes
        # Only products that oneDNN packs are worth it.
        is_packed = pretrained.make_linear is make_linear
        self._is_padded = is_packed and self._cache.device.type == "cpu"
        self.embedding: torch.Tensor = pretrained.model.get_input_embeddings().weight
        text = pretrained.model.config.text_config
        self._groups = text.num_attention_heads // text.num_key_value_heads
        self._scaling = (text.hidden_size // text.num_attention_heads) ** -0.5
        self._slots: dict[int, _Slot] = {}
        with torch.inference_mode():
            self._rotary_table = self._text_rotary(min(2048, self._info.max_context_length))

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    @property
    def num_layers(self) -> int:
        """Decoder layers in all."""
        return self._stack.num_layers

    @property
    def joins_tails(self) -> bool:
        """Whether ``forward`` takes a prompt's tail: not where every step has as many rows."""
        return self._static is None or not self._static.is_exact

    @abstractmethod
    def prepare(
        self, messages: Sequence[ChatMessage], media: Sequence[DecodedMedia], frame_plan: FramePlan
    ) -> Prompt:
        """See VideoLanguageModel.prepare."""

    @torch.inference_mode()
    def embed_visual(
        self, prompt: Prompt, cache: FeatureCache | None = None
    ) -> torch.Tensor | None:
        """See VideoLanguageModel.embed_visual.

        The rows of the videos, which are the prunable ones, come first; those of images and of
        ``embed_others`` follow. Items pass the tower one by one, so that what one gives does not
        depend on what is asked for beside it.
        """
        if not prompt.items:
            return None
        rows = []
        for index, item in enumerate(prompt.items):
            features = None if cache is None else cache.get(item.digest)
            if features is None:
                features = self.embed_item(prompt, index)
                if cache is not None:
                    cache.put(item.digest, features)
            rows.append(features)
        return torch.cat([*rows, *self.embed_others(prompt)])

    @abstractmethod
    def embed_item(self, prompt: Prompt, index: int) -> torch.Tensor:
        """What the vision tower gives for ``prompt.items[index]``: ``[num_tokens, hidden]``."""

    def embed_others(self, prompt: Prompt) -> Sequence[torch.Tensor]:
        """Visual rows (``[rows, hidden]`` each) that belong to no item: separators."""
        return ()

    def visual_places(self, prompt: Prompt) -> torch.Tensor:
        """Where in ``input_ids`` the rows of ``embed_visual`` stand: int64, one a row.

        The prunable tokens come first, in their order. Needs no items: other ranks have none.
        """
        return prompt.visual_indices

    @torch.inference_mode()
    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """See VideoLanguageModel.copy_rows."""
        self._cache.copy(source, slot, num_rows)

    def prefill(
        self,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        tap: AttentionTap | None = None,
        num_reused: int = 0,
    ) -> Iterator[torch.Tensor | None]:
        """See VideoLanguageModel.prefill; each layer group takes a long prompt in chunks.

        Groups are small, and the smaller the longer the prompt, so that a sequence can be left or
        another one stepped between two pieces; one group ends where the tap does. The last layer
        stands alone: all its keys and values are wanted, but only its last row's output.
        """
        assert tap is None or kept is None, "scores are about all visual tokens"
        assert tap is None or bool((prompt.question_indices >= num_reused).all())
        with torch.inference_mode():
            hidden, rotary = self._prompt_rows(prompt, visual, kept, num_reused)
            self._begin_slot(slot, prompt, num_reused + hidden.shape[0])
            chunks = self._chunks(slot, num_reused, hidden.shape[0])
        num_tapped = 0 if tap is None else tap.num_layers
        assert tap is None or 0 < num_tapped <= self.num_layers, (num_tapped, self.num_layers)
        queries: dict[int, list[torch.Tensor]] = {}
        # To the device before any layer: a copy in between would wait for those before it.
        taps = []
        if tap is not None:
            taps = [self._query_tap(prompt, num_reused, rows, queries) for rows, _ in chunks]
        visual_places = prompt.visual_indices.to(self.embedding.device)
        bounds = self._group_bounds(num_tapped, hidden.shape[0])
        for first, last in itertools.pairwise(bounds):
            for index, (rows, step) in enumerate(chunks):
                if first < num_tapped and (query_tap := taps[index]) is not None:
                    step = replace(step, taps=(query_tap,))
                if first == self.num_layers - 1:
                    step = replace(step, wants_last_row=True)
                with torch.inference_mode():
                    self._run_chunk(hidden[rows], rotary[rows], step, first, last)
                    if tap is not None and last == num_tapped and index == len(chunks) - 1:
                        self._fill_tap(tap, slot, prompt.length, queries, visual_places)
                yield None
        with torch.inference_mode():
            logits = self._stack.logits(hidden[-1:])[0]
        self._slots[slot] = _Slot(num_reused + hidden.shape[0], prompt.next_position)
        yield logits

    def _run_chunk(
        self, hidden: torch.Tensor, rotary: torch.Tensor, step: Step, first: int, last: int
    ) -> None:
        """Layers ``first:last`` on a chunk of a prompt, in place."""
        output = self._stack.run(hidden, rotary, step, first, last)
        hidden[-output.shape[0] :] = output

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """See VideoLanguageModel.forward; ContextLengthError when a slot is full."""
        placed = [self._place(sequence) for sequence in plan.sequences]
        if plan.tails:
            placed += [self._place_tail(tail) for tail in plan.tails]
        elif self._static is not None and self._static.covers(placed):
            return self._static.forward(placed)
        elif self._compiled is not None and self._compiled.covers(placed):
            return self._compiled.forward(placed[0])
        by_slot = sorted(placed, key=lambda rows: rows.slot)
        token_ids = [token_id for rows in by_slot for token_id in rows.token_ids]
        rotary = [rows.rotary for rows in by_slot]
        num_rows = len(token_ids)
        num_padding = padded_rows(num_rows) - num_rows if self._is_padded else 0
        if num_padding:
            token_ids += [0] * num_padding
            rotary.append(self._rotary_table[:num_padding])
        device = self.embedding.device
        asked = None  # to the device before any layer: a copy behind them would wait for them
        in_order = all(one is other for one, other in zip(placed, by_slot, strict=True))
        if plan.tails or not in_order:
            order = _as_asked(placed, by_slot, num_tails=len(plan.tails))
            num_rows = len(order)
            if self._is_padded:
                order += [0] * (padded_rows(num_rows) - num_rows)
            asked = torch.tensor(order, device=device)
        hidden = torch.embedding(self.embedding, torch.tensor(token_ids, device=device))
        factors = rotary[0] if len(rotary) == 1 else torch.cat(rotary)
        step = Step(self._plan(by_slot), self._cache.dtype, num_padding=num_padding)
        tapped = [tail for tail in plan.tails if tail.tap is not None]
        num_tapped = 0
        if tapped:
            num_tapped, hidden = self._run_tapped(hidden, factors, step, tapped, by_slot)
        hidden = self._stack.run(hidden, factors, step, num_tapped, self.num_layers)
        if asked is not None:
            hidden = hidden.index_select(0, asked)
        return self._stack.logits(hidden)[:num_rows]

    def _run_tapped(
        self,
        hidden: torch.Tensor,
        rotary: torch.Tensor,
        step: Step,
        tails: Sequence[PromptTail],
        by_slot: Sequence[PlacedRows],
    ) -> tuple[int, torch.Tensor]:
        """The layers of the tails' taps on the rows of a step: how many, and what they give."""
        device = self.embedding.device
        taps, visual_places = [], []
        for tail in tails:
            first_row = sum(rows.num_rows for rows in by_slot if rows.slot < tail.slot)
            question = tail.prompt.question_indices - tail.num_reused + first_row
            taps.append(QueryTap(question.to(device), {}))
            visual_places.append(tail.prompt.visual_indices.to(device))
        (num_layers,) = {tail.tap.num_layers for tail in tails if tail.tap is not None}
        hidden = self._stack.run(hidden, rotary, replace(step, taps=tuple(taps)), 0, num_layers)
        for tail, tap, places in zip(tails, taps, visual_places, strict=True):
            assert tail.tap is not None
            self._fill_tap(tail.tap, tail.slot, tail.prompt.length, tap.queries, places)
            tail.on_scored()
        return num_layers, hidden

    def _plan(self, by_slot: Sequence[PlacedRows]) -> tuple[SequenceStep | BatchStep, ...]:
        """What is attended together, in order of slots."""
        parts: list[SequenceStep | BatchStep] = []
        first_row = 0
        for group in worth_batching(by_slot, self._cache.device):
            if len(group) > 1:
                part: SequenceStep | BatchStep = plan_batch(
                    self._cache, group, first_row=first_row, groups=self._groups
                )
            else:
                part = plan_sequence(
                    self._cache,
                    group[0].slot,
                    first_row=first_row,
                    start=group[0].start,
                    num_rows=group[0].num_rows,
                    groups=self._groups,
                )
            parts.append(part)
            first_row += part.num_rows
        return tuple(parts)

    def _place(self, sequence: SequenceRows) -> PlacedRows:
        """Where a sequence's rows go; ContextLengthError when its slot is full."""
        slot = self._slots[sequence.slot]
        num_rows = len(sequence.token_ids)
        start = slot.prompt_length + sequence.start_index
        if start + num_rows > self._cache.shape.capacity:
            raise ContextLengthError(
                f"{start + num_rows} tokens do not fit in a context of {self._cache.shape.capacity}"
            )
        position = slot.next_position + sequence.start_index
        rotary = self._completion_rotary(position, num_rows)
        return PlacedRows(sequence.slot, start, sequence.token_ids, rotary)

    def _place_tail(self, tail: PromptTail) -> PlacedRows:
        """The same for the rest of a prompt, whose rows are those before the first one of the
        completion."""
        prompt, num_rows = tail.prompt, tail.num_rows
        self._begin_slot(tail.slot, prompt, prompt.length)
        self._slots[tail.slot] = _Slot(prompt.length, prompt.next_position)
        token_ids = tuple(prompt.input_ids[tail.num_reused :].tolist())
        return self._place(SequenceRows(tail.slot, -num_rows, token_ids))

    def _begin_slot(self, slot: int, prompt: Prompt, num_cached: int) -> None:
        """A prompt that will have ``num_cached`` rows in the slot is about to be run; raises
        ContextLengthError where these leave no room."""
        capacity = self._cache.shape.capacity
        if num_cached >= capacity:
            raise ContextLengthError(
                f"a prompt of {num_cached} cached tokens leaves no room in a context of {capacity}"
            )
        self._slots.pop(slot, None)
        self._cache.forget(slot)
        self._cover_positions(prompt.next_position + capacity - num_cached)  # not in a step

    def _group_bounds(self, num_tapped: int, num_rows: int) -> list[int]:
        """The layers at which groups begin and end, in order."""
        num_groups = min(_LEAST_LAYER_GROUPS * -(-num_rows // _GROUP_ROWS), self.num_layers)
        num_groups = max(num_groups, _LEAST_LAYER_GROUPS)
        bounds = {round(self.num_layers * i / num_groups) for i in range(num_groups)}
        return sorted(bounds | {num_tapped, self.num_layers - 1, self.num_layers})

    def _query_tap(
        self,
        prompt: Prompt,
        num_reused: int,
        rows: slice,
        queries: dict[int, list[torch.Tensor]],
    ) -> QueryTap | None:
        """Collects the question's queries among ``rows`` of those that are run; None: there are
        none."""
        question = prompt.question_indices - num_reused
        tapped = question[(question >= rows.start) & (question < rows.stop)] - rows.start
        if not tapped.shape[0]:
            return None
        return QueryTap(tapped.to(self.embedding.device), queries)

    def _fill_tap(
        self,
        tap: AttentionTap,
        slot: int,
        prompt_length: int,
        queries: dict[int, list[torch.Tensor]],
        visual: torch.Tensor,
    ) -> None:
        """The tap's scores, of the ``queries`` that were kept of its layers."""
        began_ns = perf_counter_ns()
        tap.layer_scores = self._score(
            slot, prompt_length, queries, tap.num_layers, visual, tap.scope
        )
        tap.score_ns = perf_counter_ns() - began_ns
        queries.clear()

    def _score(
        self,
        slot: int,
        prompt_length: int,
        queries: dict[int, list[torch.Tensor]],
        num_layers: int,
        visual: torch.Tensor,
        scope: Scope,
    ) -> torch.Tensor:
        """Attention of the kept queries to the visual tokens' cached keys, a layer a row."""
        if not queries:  # no visual tokens, hence no question about them
            return torch.empty(num_layers, 0, device=self.embedding.device)
        keys, _ = self._cache.seen(slot, prompt_length)
        return torch.stack(
            [
                attention_scores(
                    torch.cat(queries[layer]),
                    keys[layer][:, 0],
                    scaling=self._scaling,
                    visual=visual,
                    scope=scope,
                )
                for layer in range(num_layers)
            ]
        )

    def _prompt_rows(
        self,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        num_reused: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings ``[rows, hidden]`` and rotary factors of the prompt's rows that are run."""
        device = self.embedding.device
        hidden = torch.embedding(self.embedding, prompt.input_ids.to(device))
        if visual is not None:
            places = self.visual_places(prompt).to(device)
            hidden.index_copy_(0, places, visual.to(hidden.dtype))
        positions = prompt.positions.to(device)
        cached = cached_places(prompt, kept)
        if cached is not None:
            cached = cached[num_reused:].to(device)
            hidden, positions = hidden[cached], positions[:, cached]
        elif num_reused:
            hidden, positions = hidden[num_reused:].clone(), positions[:, num_reused:]
        assert hidden.shape[0] > 0, "the last row is never reused: its logits are wanted"
        return hidden, self._stack.rotary(positions)

    def _chunks(self, slot: int, num_reused: int, num_rows: int) -> list[tuple[slice, Step]]:
        """Stretches of the ``num_rows`` rows that are run, and the step of each."""
        end = num_reused + num_rows
        chunks = []
        starts = range(num_reused, end, _CHUNK_ROWS)
        mask = None
        if starts[-1] > 0:
            mask = ChunkMask(
                self._cache, num_rows=min(_CHUNK_ROWS, num_rows), last_start=starts[-1]
            )
        for start in starts:
            rows = slice(start - num_reused, min(start - num_reused + _CHUNK_ROWS, num_rows))
            sequence = plan_sequence(
                self._cache,
                slot,
                first_row=0,
                start=start,
                num_rows=rows.stop - rows.start,
                groups=self._groups,
                chunk_mask=mask,
            )
            chunks.append((rows, Step((sequence,), self._cache.dtype)))
        return chunks

    def _completion_rotary(self, position: int, num_rows: int) -> torch.Tensor:
        return self._rotary_table[position : position + num_rows]

    def _cover_positions(self, end: int) -> None:
        """Sees to it that the table has the rotary factors of all positions below ``end``."""
        if end > self._rotary_table.shape[0]:
            self._rotary_table = self._text_rotary(end)

    def _text_rotary(self, length: int) -> torch.Tensor:
        """Rotary factors of text positions ``0:length``, which are the same on every axis."""
        positions = torch.arange(length, device=self.embedding.device)
        return self._stack.rotary(positions.expand(self._num_axes, length))


def _as_asked(
    placed: Sequence[PlacedRows], by_slot: Sequence[PlacedRows], *, num_tails: int
) -> list[int]:
    """Where each row of ``placed``, one sequence after another, stands among those by slot; of the
    last ``num_tails`` only their last rows."""
    firsts, num_rows = {}, 0
    for rows in by_slot:
        firsts[rows.slot] = num_rows
        num_rows += rows.num_rows
    assert len(firsts) == len(placed), "a slot is stepped once"
    num_whole = len(placed) - num_tails
    order = [firsts[one.slot] + row for one in placed[:num_whole] for row in range(one.num_rows)]
    return order + [firsts[one.slot] + one.num_rows - 1 for one in placed[num_whole:]]
