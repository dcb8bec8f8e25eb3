"""The model of every family: slots, prefill by layer groups and chunks, forward."""

import itertools
import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hippo.catalog.sizes import CHUNK_ROWS as _CHUNK_ROWS
from hippo.errors import ContextLengthError
from hippo.models.attention.parts import AttentionPlan, plan_chunks
from hippo.models.attention.rows import PlacedRows, layer_groups
from hippo.models.attention.tap import AlignmentScorer, AttentionScorer, Scorer
from hippo.models.families.family import Family
from hippo.models.interface.base import (
    AttentionTap,
    FeatureCache,
    PrefillHelp,
    Prompt,
    SequenceRows,
    StepPlan,
)
from hippo.models.interface.content import cached_places, kept_ends
from hippo.models.interface.transfer import to_device
from hippo.models.loading.pretrained import Pretrained
from hippo.models.runners.fixed import ExactRunner

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Slot:
    """The length and next position of a slot's prompt."""

    prompt_length: int  # cached tokens, without pruned ones
    next_position: int


class CachedModel:
    """A loaded checkpoint with its KV cache; implements VideoLanguageModel."""

    def __init__(self, pretrained: Pretrained, family: Family) -> None:
        self.model = pretrained.model
        self.embedding: torch.Tensor = pretrained.model.get_input_embeddings().weight
        self.num_layers = pretrained.stack.num_layers
        self.hidden_size: int = self.embedding.shape[1]
        self._stack = pretrained.stack
        self._cache = pretrained.cache
        self._eager = pretrained.eager
        self._fixed = pretrained.fixed
        self._num_axes = family.num_axes
        self._prompts = family.make_prompts(pretrained)
        self.frame_limits = self._prompts.frame_limits
        self.prepare_prompt = self._prompts.build_prompt
        self._tower = family.make_tower(pretrained)
        self.info = replace(
            pretrained.info,
            video_hash=self._prompts.video_hash(),
            template_names=self._prompts.template_names,
        )
        context, bytes_each = self.info.max_context_length, self.embedding.dtype.itemsize
        self.frame_bytes = pretrained.shape.frame_bytes(context)
        self.feature_bytes = pretrained.shape.feature_bytes(context, bytes_each=bytes_each)
        self._slots: dict[int, _Slot] = {}
        with torch.inference_mode():
            self._rotary_table = self._text_rotary(min(2048, context))
        if isinstance(self._fixed, ExactRunner):
            self._fixed.fit_rows(self._rotary_table)

    def capture_steps(self) -> Iterator[int]:
        """Captures steps as CUDA graphs if the plan asks for them; called before any prefill.
        Yields the number of graphs after each capture."""
        if self._fixed is None:
            return
        count = 0
        for count in self._fixed.capture_all(self._rotary_table):
            yield count
        if count:
            _log.info("captured %d shapes of steps as CUDA graphs", count)

    def embed_visual(
        self, prompt: Prompt, cache: FeatureCache | None = None
    ) -> torch.Tensor | None:
        """See VideoLanguageModel.embed_visual."""
        pieces = self.embed_pieces(prompt, cache)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                features: torch.Tensor | None = end.value
                return features

    @torch.inference_mode()
    def embed_pieces(
        self, prompt: Prompt, cache: FeatureCache | None = None
    ) -> Generator[torch.Tensor, None, torch.Tensor | None]:
        """See VideoLanguageModel.embed_pieces.

        The rows of videos, which are prunable, come first, followed by the rows of images and
        separators. The tower runs on one item at a time, so that the features of an item do not
        depend on the other items of the prompt.
        """
        if not prompt.items:
            return None
        rows = []
        for item in prompt.items:
            features = None if cache is None else cache.get(item.digest)
            if features is None:
                parts = []
                for part in self._tower.embed_item(item):
                    parts.append(part)
                    yield part
                features = _joined(parts)
                if cache is not None:
                    cache.put(item.digest, features)
            else:
                yield features
            rows.append(features)
        for others in self._tower.embed_others(prompt):
            yield others
            rows.append(others)
        return _joined(rows)

    def reusable_rows(self, slot: int, num_rows: int) -> int:
        """See VideoLanguageModel.reusable_rows."""
        return self._cache.reusable_rows(slot, num_rows)

    @torch.inference_mode()
    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """See VideoLanguageModel.copy_rows."""
        self._cache.copy_rows(source, slot, num_rows)
        self._stack.copy_states(self._cache.states, source, slot, num_rows)

    def prefill(
        self,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        tap: AttentionTap | None = None,
        num_reused: int = 0,
    ) -> Generator[torch.Tensor | None]:
        """See VideoLanguageModel.prefill; each layer group takes a long prompt in chunks.

        Groups get smaller as prompts get longer, so that the engine can close the sequence or step
        other sequences between two pieces. One group ends at the last tapped layer. The last layer
        is a group of its own: its keys and values are cached for all rows, but its output is
        computed for the last row only.
        """
        with torch.inference_mode():
            hidden, rotary, added = self._prompt_rows(prompt, visual, kept, num_reused)
            del visual  # the caller may free it from here on
            self._begin_slot(slot, prompt, num_reused + hidden.shape[0])
            marks = kept_ends(prompt, kept) if self._cache.states else ()
            tapped = chunks = self._chunks(slot, num_reused, hidden.shape[0], _CHUNK_ROWS, marks)
            scorer = None
            if tap is not None:
                assert kept is None, "scores are about all visual tokens"
                scorer = self._make_scorer(tap, prompt, slot, num_reused)
                scorer.add_scores(hidden, 0)
                tapped = [(rows, scorer.tapped(rows, step)) for rows, step in chunks]
        num_tapped = 0 if scorer is None else scorer.num_layers
        bounds = layer_groups(self.num_layers, num_tapped, hidden.shape[0], len(added))
        for first, last in itertools.pairwise(bounds):
            for rows, step in tapped if first < num_tapped else chunks:
                if first == self.num_layers - 1:
                    step = replace(step, wants_last_row=True)
                with torch.inference_mode():
                    self._run_chunk(hidden[rows], rotary[rows], step, first, last)
                    if rows.stop == hidden.shape[0]:  # all rows have passed these layers
                        if last <= len(added):
                            hidden.index_add_(0, *added[last - 1])
                        if scorer is not None and last <= num_tapped:
                            scorer.add_scores(hidden, last)
                yield None
        with torch.inference_mode():
            logits = self._stack.logits(hidden[-1:])[0]
        self._finish_slot(slot, prompt, num_reused + hidden.shape[0])
        yield logits

    def begin_help(
        self, slot: int, prompt: Prompt, tap: AttentionTap | None, num_reused: int
    ) -> PrefillHelp | None:
        """See VideoLanguageModel.begin_help; HelpedModel has a helper."""
        return None

    def _make_scorer(self, tap: AttentionTap, prompt: Prompt, slot: int, num_reused: int) -> Scorer:
        assert 0 < tap.num_layers <= self.num_layers, (tap.num_layers, self.num_layers)
        if not tap.is_alignment:
            stack = self._stack
            num_layers = max(tap.num_layers, stack.first_attention + 1)
            return AttentionScorer(
                tap,
                prompt,
                num_reused,
                self._cache,
                slot,
                stack.scaling,
                num_layers=num_layers,
                num_scoring=stack.num_attending(num_layers),
            )
        assert tap.num_layers < self.num_layers, "the last layer's output is of one row"
        return AlignmentScorer(tap, prompt, num_reused, self._cache.device)

    def _run_chunk(
        self, hidden: torch.Tensor, rotary: torch.Tensor, step: AttentionPlan, first: int, last: int
    ) -> None:
        """Runs layers ``first:last`` on a chunk of a prompt, in place."""
        output = self._stack.run(hidden, rotary, step, first, last)
        hidden[-output.shape[0] :] = output

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """See VideoLanguageModel.forward; raises ContextLengthError if a slot is full."""
        placed = [self._place_rows(sequence) for sequence in plan.sequences]
        if self._fixed is not None and self._fixed.covers(placed):
            return self._fixed.forward(placed)
        return self._eager.forward(placed)

    def _place_rows(self, sequence: SequenceRows) -> PlacedRows:
        """Locates a step's rows in the cache; raises ContextLengthError if the slot is full."""
        slot = self._slots[sequence.slot]
        num_rows = len(sequence.token_ids)
        start = slot.prompt_length + sequence.start_index
        if start + num_rows > self._cache.shape.capacity:
            raise ContextLengthError(f"{start + num_rows} tokens do not fit in {self._room()}")
        position = slot.next_position + sequence.start_index
        rotary = self._rotary_table[position : position + num_rows]
        least = sequence.least_start
        if least is not None:
            least += slot.prompt_length
        return PlacedRows(sequence.slot, start, sequence.token_ids, rotary, least)

    def _room(self) -> str:
        """Names the length of a slot, for an error."""
        if self.info.slot_tokens == self.info.max_context_length:
            return f"a context of {self.info.max_context_length}"
        return (
            f"the {self.info.slot_tokens} tokens that a slot of {self.info.name} caches "
            "(--cache-tokens)"
        )

    def _begin_slot(self, slot: int, prompt: Prompt, num_cached: int) -> None:
        """Prepares a slot for a prompt of ``num_cached`` cached rows; raises ContextLengthError if
        no room is left for a completion."""
        capacity = self._cache.shape.capacity
        if num_cached >= capacity:
            raise ContextLengthError(
                f"a prompt of {num_cached} cached tokens leaves no room in {self._room()}"
            )
        self._slots.pop(slot, None)
        self._cache.forget_slot(slot)
        num_positions = prompt.next_position + capacity - num_cached
        if num_positions > self._rotary_table.shape[0]:  # steps need not extend the table then
            self._rotary_table = self._text_rotary(num_positions)

    def _finish_slot(self, slot: int, prompt: Prompt, num_cached: int) -> None:
        """Marks a slot as filled with a prompt of ``num_cached`` cached rows."""
        self._slots[slot] = _Slot(num_cached, prompt.next_position)

    def _prompt_rows(
        self,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        num_reused: int,
    ) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Returns embeddings ``[rows, hidden]`` and rotary factors of the rows not reused, and for
        each of the first layers the rows (int64) to which features are added behind that layer,
        with these features."""
        device = self.embedding.device
        hidden = torch.embedding(self.embedding, to_device(prompt.input_ids, device))
        width = hidden.shape[1]
        places = torch.cat((prompt.visual_indices, prompt.other_indices))
        if visual is not None:
            embedded = visual[:, :width].to(hidden.dtype)
            hidden.index_copy_(0, to_device(places, device), embedded)
        positions = to_device(prompt.positions, device)
        cached = cached_places(prompt, kept)
        if cached is not None:
            cached = cached[num_reused:]
            there = to_device(cached, device)
            hidden, positions = hidden[there], positions[:, there]
        elif num_reused:
            hidden, positions = hidden[num_reused:].clone(), positions[:, num_reused:]
        assert hidden.shape[0] > 0, "the last row is never reused: its logits are needed"
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        if visual is not None and visual.shape[1] > width:
            if cached is None:
                cached = torch.arange(num_reused, prompt.length)
            is_run = torch.isin(places, cached)
            rows = to_device(torch.searchsorted(cached, places[is_run]), device)
            features = visual[:, width:]
            if not is_run.all():
                features = features[to_device(is_run.nonzero()[:, 0], device)]
            added = [(rows, part) for part in torch.split(features.to(hidden.dtype), width, 1)]
        return hidden, self._rotary(positions), added

    def _chunks(
        self,
        slot: int,
        num_reused: int,
        num_rows: int,
        chunk_rows: int,
        marks: tuple[int, ...] = (),
    ) -> list[tuple[slice, AttentionPlan]]:
        """Cuts the ``num_rows`` rows to run into chunks, and returns each with its step."""
        return plan_chunks(
            self._cache,
            slot,
            start=num_reused,
            num_rows=num_rows,
            chunk_rows=chunk_rows,
            groups=self._stack.groups,
            is_flash=self._eager.has_flash,
            marks=marks,
        )

    def _text_rotary(self, length: int) -> torch.Tensor:
        """Returns rotary factors of text positions ``0:length``, which are equal on all axes."""
        positions = torch.arange(length, device=self.embedding.device)
        return self._rotary(positions.expand(self._num_axes, length))

    def _rotary(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns DecoderStack.rotary of ``positions``, chunk by chunk: its intermediate results
        take several times as much memory."""
        parts = [self._stack.rotary(part) for part in torch.split(positions, _CHUNK_ROWS, 1)]
        return _joined(parts)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the rows of all parts; the rows of a single part are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
