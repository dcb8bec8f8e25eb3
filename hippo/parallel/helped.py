"""A model whose long prompts a helper on another device reads too, as a pipeline of two stages.

    helper  layers 0:k   | chunk 0 | chunk 1 | chunk 2 | chunk 3 |
    model   layers k:L             | chunk 0 | chunk 1 | chunk 2 | chunk 3 | -> first token

The helper sends each chunk's hidden states, and its layers' keys and values, which the model writes
to its own cache. After the prefill the model has all that it would have computed itself. What the
helper does not send in time, the model computes.
"""

import itertools
from collections.abc import Generator
from dataclasses import dataclass, replace
from time import perf_counter, perf_counter_ns

import torch

from hippo.catalog.sizes import LEAST_CHUNK_ROWS, chunk_rows_for
from hippo.models.attention.parts import AttentionPlan
from hippo.models.attention.rows import layer_groups
from hippo.models.attention.tap import AttentionScorer
from hippo.models.cached import CachedModel
from hippo.models.families.family import Family
from hippo.models.interface.base import AttentionTap, Prompt
from hippo.models.interface.content import has_visual_from
from hippo.models.interface.transfer import to_device
from hippo.models.loading.pretrained import Pretrained
from hippo.parallel.help import HelpWith
from hippo.parallel.helper_link import Help, HelperLink

_OVER = "over"
_LONGEST_WAIT_S = 0.002  # of the device thread, between two looks at the inbox


class HelpedModel(CachedModel):
    """A CachedModel with a prefill helper, from the time on when ``helper`` is set."""

    def __init__(self, loaded: Pretrained, family: Family) -> None:
        super().__init__(loaded, family)
        self.helper: HelperLink | None = None
        self._feature_parts = loaded.shape.tower.feature_parts
        self._speed = _Speed(self.num_layers, is_queued=self.embedding.is_cuda)

    def prefill(
        self,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        tap: AttentionTap | None = None,
        num_reused: int = 0,
    ) -> Generator[torch.Tensor | None]:
        """See VideoLanguageModel.prefill."""
        pieces = super().prefill(slot, prompt, visual, kept, tap, num_reused)
        del visual
        num_rows = prompt.length - num_reused
        yield from pieces if kept is not None else self._speed.measured(pieces, num_rows)

    @torch.inference_mode()
    def begin_help(
        self, slot: int, prompt: Prompt, tap: AttentionTap | None, num_reused: int
    ) -> "_HelpedPrefill | None":
        """See VideoLanguageModel.begin_help."""
        helper = self.helper
        if helper is None or not self._can_help(helper, prompt, tap, num_reused):
            return None
        self._begin_slot(slot, prompt, prompt.length)
        num_rows = prompt.length - num_reused
        chunk_rows = chunk_rows_for(num_rows)
        chunks = self._chunks(slot, num_reused, num_rows, chunk_rows)
        scorer: AttentionScorer | None = None
        tapped: tuple[tuple[int, ...], ...] = ((),) * len(chunks)
        if tap is not None:
            scorer = AttentionScorer(
                tap, prompt, num_reused, self._cache, slot, self._stack.scaling
            )
            tapped = tuple(tuple(scorer.text_in(rows).tolist()) for rows, _ in chunks)
        num_added = self._feature_parts - 1 if prompt.items else 0
        command = HelpWith(
            number=helper.next_number(),
            num_reused=num_reused,
            num_rows=prompt.length,
            chunk_rows=chunk_rows,
            num_added=min(num_added, helper.num_layers),
            num_tapped=0 if scorer is None else min(scorer.num_layers, helper.num_layers),
            tapped=tapped,
        )
        device = self.embedding.device
        hidden = torch.embedding(self.embedding, to_device(prompt.input_ids, device))
        places = torch.cat((prompt.visual_indices, prompt.other_indices))
        rotary = self._rotary(to_device(prompt.positions, device))
        added = hidden.new_empty(num_added, places.shape[0], hidden.shape[1])
        state = _HelpedPrefill(
            model=self,
            slot=slot,
            prompt=prompt,
            hidden=hidden,
            rotary=rotary,
            places=places,
            added=added,
            num_reused=num_reused,
            chunks=chunks,
            scorer=scorer,
            helper=helper,
            help=helper.begin(command),
        )
        try:
            state.feed_complete()
        except BaseException:
            state.close()
            raise
        return state

    def _can_help(
        self, helper: HelperLink, prompt: Prompt, tap: AttentionTap | None, num_reused: int
    ) -> bool:
        """Whether help makes the prefill shorter: of one chunk nothing overlaps; rows that the
        model has are run again by the helper, which costs a chunk's time at most, and their
        features must be at hand; and alignment needs the hidden states of all rows between two
        layers, which are not sent."""
        num_rows = prompt.length - num_reused
        return (
            helper.is_free
            and num_rows > chunk_rows_for(num_rows)
            and num_reused <= chunk_rows_for(num_rows)
            and prompt.length < self._cache.shape.capacity
            and (not prompt.items or has_visual_from(prompt, num_reused))
            and (tap is None or not tap.is_alignment)
        )

    def run_helped(self, state: "_HelpedPrefill") -> Generator[torch.Tensor | None]:
        """Runs the layers behind the helper's over each chunk that it sends, and all layers over
        the others."""
        began_s = perf_counter()
        for index in range(len(state.chunks)):
            yield from self._wait_for_chunk(state, index)
            first = state.helper.num_layers if index < state.num_come else 0
            yield from self._run_layers_from(first, state, index)
        with torch.inference_mode():
            logits = self._stack.logits(state.hidden[-1:])[0]
        self._finish_slot(state.slot, state.prompt, state.prompt.length)
        if state.num_come:
            num_rows = state.prompt.length - state.num_reused
            state.num_rows = state.chunks[state.num_come - 1][0].stop
            state.helper_ns = state.came_ns - state.began_ns
            alone_s = self._speed.seconds_for(num_rows, self.num_layers)
            state.saved_ns = int(1e9 * (alone_s - (perf_counter() - began_s)))
        yield logits

    def _wait_for_chunk(self, state: "_HelpedPrefill", index: int) -> Generator[None]:
        """Waits until the helper has sent a chunk, but no longer than its layers would take here
        for the rows that are left: going on alone then costs as much again at most."""
        patience_s = self.patience_s(state, index)
        while state.help is not None and state.num_come <= index:
            began_s = perf_counter()
            if self._take_chunk(state, _LONGEST_WAIT_S):
                return
            patience_s -= perf_counter() - began_s
            if patience_s <= 0 or state.help.is_cut:
                state.close()
            yield None

    def patience_s(self, state: "_HelpedPrefill", index: int) -> float:
        """Returns how long to wait for a chunk."""
        num_left = state.prompt.length - state.num_reused - state.chunks[index][0].start
        return self._speed.seconds_for(num_left, state.helper.num_layers)

    def _take_chunk(self, state: "_HelpedPrefill", timeout_s: float = 0.0) -> bool:
        """Takes over what the helper has computed of its next chunk, if it has come."""
        help_ = state.help
        chunk = None if help_ is None else state.helper.take(help_, timeout_s)
        if help_ is None or chunk is None:
            return False
        rows, _ = state.chunks[state.num_come]
        state.num_come += 1
        state.came_ns = perf_counter_ns()
        with torch.inference_mode():
            first, end = state.num_reused + rows.start, state.num_reused + rows.stop
            own = self._cache.first_layers(state.helper.num_layers, state.slot, first, end)
            own.copy_(chunk.cached, non_blocking=True)
            state.hidden[first:end].copy_(chunk.hidden, non_blocking=True)
            queries = chunk.queries.to(self._cache.device, non_blocking=True, copy=True)
            state.helper.give_back(help_)
            if state.scorer is not None:
                if queries.numel():
                    state.scorer.add_queries(queries)
                if state.scorer.num_layers <= state.helper.num_layers:
                    state.count_scored()
        return True

    def _run_layers_from(self, first: int, state: "_HelpedPrefill", index: int) -> Generator[None]:
        """Runs a chunk through the layers from ``first`` on: all, or those behind the helper's."""
        rows, step = state.chunks[index]
        start, stop = state.num_reused + rows.start, state.num_reused + rows.stop
        hidden, rotary = state.hidden[start:stop], state.rotary[start:stop]
        num_tapped = 0 if state.scorer is None else state.scorer.num_layers
        groups = layer_groups(self.num_layers, num_tapped, hidden.shape[0], len(state.added))
        bounds = sorted({first, *filter(first.__lt__, groups)})
        for begin, end in itertools.pairwise(bounds):
            current = step
            if begin < num_tapped:
                assert state.scorer is not None
                current = state.scorer.tapped(rows, step)
            if begin == self.num_layers - 1:
                current = replace(current, wants_last_row=True)
            with torch.inference_mode():
                self._run_chunk(hidden, rotary, current, begin, end)
                if end <= len(state.added):
                    hidden += state.added_to(start, stop)[end - 1]
                if end == num_tapped:
                    state.count_scored()
            while self._take_chunk(state):
                pass
            yield None


class _Speed:
    """How long a row takes in a layer here: in the last prefill without help of as many rows as a
    chunk has at least, or before one in the last shorter prefill, whose rows take longer."""

    def __init__(self, num_layers: int, *, is_queued: bool) -> None:
        """``is_queued``: a piece is not over when it has returned, as on a GPU; the time between
        two pieces then counts."""
        self._num_layers, self._is_queued = num_layers, is_queued
        self._seconds_each = 0.0
        self._is_of_many_rows = False

    def seconds_for(self, num_rows: int, num_layers: int) -> float:
        """Returns how long rows take in layers."""
        return self._seconds_each * num_rows * num_layers

    def measured(
        self, pieces: Generator[torch.Tensor | None], num_rows: int
    ) -> Generator[torch.Tensor | None]:
        """Yields from a prefill of all layers, and takes the time of its pieces."""
        seconds, began_s = 0.0, perf_counter()
        try:
            while True:
                began_s = began_s if self._is_queued else perf_counter()
                piece = next(pieces, _OVER)
                seconds += (now_s := perf_counter()) - began_s
                began_s = now_s
                if isinstance(piece, str):
                    break
                yield piece
        finally:
            pieces.close()
        has_many = num_rows >= LEAST_CHUNK_ROWS
        if has_many or not self._is_of_many_rows:
            self._seconds_each = seconds / (num_rows * self._num_layers)
            self._is_of_many_rows = has_many


@dataclass(slots=True, eq=False, kw_only=True)
class _HelpedPrefill:
    """See PrefillHelp: a prompt's rows, and how far helper and model are with them."""

    model: HelpedModel
    slot: int
    prompt: Prompt
    hidden: torch.Tensor  # [length, hidden_size]
    rotary: torch.Tensor
    places: torch.Tensor  # int64, on the CPU: the features' rows in the prompt
    added: torch.Tensor  # [num_added, features, hidden_size]: added behind the first layers
    num_reused: int
    chunks: list[tuple[slice, AttentionPlan]]  # of the rows that are not reused
    scorer: AttentionScorer | None
    helper: HelperLink
    help: Help | None  # None: nothing more will come
    num_features: int = 0  # that have been added
    came_ns: int = 0  # when the helper's last chunk came
    num_come: int = 0  # chunks that the helper has sent
    num_scored: int = 0  # chunks that have passed the tapped layers
    num_rows: int = 0
    began_ns: int = 0
    helper_ns: int = 0
    saved_ns: int = 0

    @torch.inference_mode()
    def add_features(self, rows: torch.Tensor) -> None:
        """See PrefillHelp.add_features."""
        begin, end = self.num_features, self.num_features + rows.shape[0]
        width = self.hidden.shape[1]
        embedded, *others = torch.split(rows.to(self.hidden.dtype), width, 1)
        self.hidden.index_copy_(0, to_device(self.places[begin:end], rows.device), embedded)
        for place, features in zip(self.added, others, strict=True):
            place[begin:end] = features
        self.num_features = end
        self.feed_complete()

    def run(self) -> Generator[torch.Tensor | None]:
        """See PrefillHelp.run."""
        assert self.num_features == self.places.shape[0], "features are missing"
        return self.model.run_helped(self)

    def close(self) -> None:
        """See PrefillHelp.close: expects nothing more of the helper."""
        if self.help is not None:
            self.helper.leave(self.help)
        self.help = None

    def feed_complete(self) -> None:
        """Gives the helper each part of the prompt whose features are there."""
        missing = self.places[self.num_features :]
        self._feed_until(int(missing.min()) if len(missing) else self.prompt.length)

    def _feed_until(self, row: int) -> None:
        """Gives the helper each part that ends at ``row`` at the latest."""
        self.helper.send_pending()
        while (help_ := self.help) is not None and help_.num_fed < len(help_.command.parts()):
            first, end = help_.command.parts()[help_.num_fed]
            if end > row:
                return
            self.began_ns = self.began_ns or perf_counter_ns()
            with self.helper.feeding(help_) as inputs:
                inputs.hidden.copy_(self.hidden[first:end], non_blocking=True)
                inputs.rotary.copy_(self.rotary[first:end], non_blocking=True)
                if num_added := len(inputs.added):
                    added = self.added_to(first, end)[:num_added]
                    for place, features in zip(inputs.added, added, strict=True):
                        place.copy_(features, non_blocking=True)

    def added_to(self, first: int, end: int) -> torch.Tensor:
        """Returns what is added behind the first layers to the rows ``first:end`` ``[num_added,
        end - first, hidden_size]``: features, and zeros for other rows."""
        device, size = self.hidden.device, (len(self.added), end - first, self.hidden.shape[1])
        inside = ((self.places >= first) & (self.places < end)).nonzero()[:, 0]
        there = to_device(self.places[inside] - first, device)
        features = self.added[:, to_device(inside, device)]
        return self.hidden.new_zeros(size).index_copy_(1, there, features)

    def count_scored(self) -> None:
        """Counts a chunk that has passed the tapped layers; behind the last one computes scores."""
        self.num_scored += 1
        if self.scorer is not None and self.num_scored == len(self.chunks):
            self.scorer.add_scores(self.hidden[self.num_reused :], self.scorer.num_layers)
