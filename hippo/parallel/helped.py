"""A model whose long prompts a helper on another device reads too, as a pipeline of two stages.

    helper  layers 0:k   | chunk 0 | chunk 1 | chunk 2 | chunk 3 |
    model   layers k:L             | chunk 0 | chunk 1 | chunk 2 | chunk 3 | -> first token

The helper sends each chunk's hidden states, and its layers' keys and values, which the model writes
to its own cache. After the prefill the model has all that it would have computed itself. What the
helper does not send in time, the model computes.
"""

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from hippo.catalog.sizes import LEAST_CHUNK_ROWS, chunk_rows_for
from hippo.models.attention.parts import AttentionPlan
from hippo.models.attention.rows import layer_groups
from hippo.models.attention.tap import AttentionScorer
from hippo.models.cached import CachedModel
from hippo.models.families.family import Family
from hippo.models.interface.base import AttentionTap, PrefillHelp, Prompt
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
        self._speed = _Speed(self.num_layers)

    def prefill(
        self,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        kept: torch.Tensor | None,
        tap: AttentionTap | None = None,
        num_reused: int = 0,
        help: PrefillHelp | None = None,
    ) -> Generator[torch.Tensor | None]:
        """See VideoLanguageModel.prefill."""
        helper = self.helper if help is not None and kept is None else None
        if (
            help is not None
            and helper is not None
            and self._can_help(helper, prompt, visual, tap, num_reused)
        ):
            state = self._begin_with_help(helper, slot, prompt, visual, tap, num_reused)
            del visual
            yield from self._prefill_with_help(state, prompt, help)
            return
        num_rows = prompt.length - num_reused
        pieces = super().prefill(slot, prompt, visual, kept, tap, num_reused)
        del visual
        yield from pieces if kept is not None else self._speed.measured(pieces, num_rows)

    def _can_help(
        self,
        helper: HelperLink,
        prompt: Prompt,
        visual: torch.Tensor | None,
        tap: AttentionTap | None,
        num_reused: int,
    ) -> bool:
        """Whether help makes the prefill shorter: of one chunk nothing overlaps; rows that the
        model has are run again by the helper, which costs a chunk's time at most; and alignment
        needs the hidden states of all rows between two layers, which are not sent."""
        num_rows = prompt.length - num_reused
        has_features = visual is not None or not prompt.visual_indices.shape[0]
        return (
            helper.is_free
            and num_rows > chunk_rows_for(num_rows)
            and num_reused <= chunk_rows_for(num_rows)
            and prompt.length < self._cache.shape.capacity
            and has_features
            and (tap is None or not tap.is_alignment)
        )

    def _prefill_with_help(
        self, state: "_HelpedPrefill", prompt: Prompt, help: PrefillHelp
    ) -> Generator[torch.Tensor | None]:
        try:
            for index in range(len(state.chunks)):
                yield from self._wait_for_chunk(state, index)
                first = state.helper.num_layers if index < state.num_come else 0
                yield from self._run_layers_from(first, state, index)
        finally:
            state.give_up()
        with torch.inference_mode():
            logits = self._stack.logits(state.hidden[-1:])[0]
        num_rows = state.hidden.shape[0]
        self._finish_slot(state.slot, prompt, state.num_reused + num_rows)
        if state.num_come:
            help.num_rows = state.chunks[state.num_come - 1][0].stop
            help.helper_ns = int(1e9 * (state.came_s - state.began_s))
            alone_s = self._speed.seconds_for(num_rows, self.num_layers)
            help.saved_ns = int(1e9 * (alone_s - (perf_counter() - state.began_s)))
        yield logits

    @torch.inference_mode()
    def _begin_with_help(
        self,
        helper: HelperLink,
        slot: int,
        prompt: Prompt,
        visual: torch.Tensor | None,
        tap: AttentionTap | None,
        num_reused: int,
    ) -> "_HelpedPrefill":
        hidden, rotary, added = self._prompt_rows(prompt, visual, None, 0)
        num_rows = hidden.shape[0]
        self._begin_slot(slot, prompt, num_rows)
        chunk_rows = chunk_rows_for(num_rows - num_reused)
        chunks = self._chunks(slot, num_reused, num_rows - num_reused, chunk_rows)
        scorer: AttentionScorer | None = None
        tapped: tuple[tuple[int, ...], ...] = ((),) * len(chunks)
        if tap is not None:
            scorer = AttentionScorer(
                tap, prompt, num_reused, self._cache, slot, self._stack.scaling
            )
            tapped = tuple(tuple(scorer.text_in(rows).tolist()) for rows, _ in chunks)
        command = HelpWith(
            number=helper.next_number(),
            num_reused=num_reused,
            num_rows=num_rows,
            chunk_rows=chunk_rows,
            num_added=min(len(added), helper.num_layers),
            num_tapped=0 if scorer is None else min(scorer.num_layers, helper.num_layers),
            tapped=tapped,
        )

        def inputs(first: int, end: int) -> list[torch.Tensor]:
            given = [hidden[first:end], rotary[first:end]]
            theirs = added[: helper.num_layers]
            return [*given, _added_to(theirs, hidden, first, end)] if theirs else given

        return _HelpedPrefill(
            slot=slot,
            hidden=hidden[num_reused:],
            rotary=rotary[num_reused:],
            added=lambda rows: _added_to(
                added, hidden, rows.start + num_reused, rows.stop + num_reused
            ),
            num_added=len(added),
            num_reused=num_reused,
            chunks=chunks,
            scorer=scorer,
            helper=helper,
            help=helper.begin(command, inputs),
        )

    def _wait_for_chunk(self, state: "_HelpedPrefill", index: int) -> Generator[None]:
        """Waits until the helper has sent a chunk, but no longer than its layers would take here
        for the rows that are left: going on alone then costs as much again at most."""
        patience_s = self.patience_s(state, index)
        while state.help is not None and state.num_come <= index:
            began_s = perf_counter()
            if self._take_chunk(state, _LONGEST_WAIT_S):
                return
            patience_s -= perf_counter() - began_s
            if patience_s <= 0 or state.helper.is_lost:
                state.give_up()
            yield None

    def patience_s(self, state: "_HelpedPrefill", index: int) -> float:
        """Returns how long to wait for a chunk."""
        num_left = state.hidden.shape[0] - state.chunks[index][0].start
        return self._speed.seconds_for(num_left, state.helper.num_layers)

    def _take_chunk(self, state: "_HelpedPrefill", timeout_s: float = 0.0) -> bool:
        """Takes over what the helper has computed of its next chunk, if it has come."""
        help_ = state.help
        buffer = None if help_ is None else state.helper.take(help_, timeout_s)
        if buffer is None:
            return False
        rows, _ = state.chunks[state.num_come]
        state.num_come += 1
        state.came_s = perf_counter()
        try:
            with torch.inference_mode():
                first, end = state.num_reused + rows.start, state.num_reused + rows.stop
                own = self._cache.first_layers(state.helper.num_layers, state.slot, first, end)
                own.copy_(buffer.cached)
                state.hidden[rows] = buffer.hidden
                if state.scorer is not None:
                    if buffer.queries is not None:
                        state.scorer.add_queries(buffer.queries.to(self._cache.device, copy=True))
                    if state.scorer.num_layers <= state.helper.num_layers:
                        state.count_scored()
        finally:
            state.helper.give_back(buffer)
        return True

    def _run_layers_from(self, first: int, state: "_HelpedPrefill", index: int) -> Generator[None]:
        """Runs a chunk through the layers from ``first`` on: all, or those behind the helper's."""
        rows, step = state.chunks[index]
        hidden, rotary = state.hidden[rows], state.rotary[rows]
        num_tapped = 0 if state.scorer is None else state.scorer.num_layers
        groups = layer_groups(self.num_layers, num_tapped, hidden.shape[0], state.num_added)
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
                if end <= state.num_added:
                    hidden += state.added(rows)[end - 1]
                if end == num_tapped:
                    state.count_scored()
            while self._take_chunk(state):
                pass
            yield None


class _Speed:
    """How long a row takes in a layer here: in the last prefill without help of as many rows as a
    chunk has at least, or before one in the last shorter prefill, whose rows take longer."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._seconds_each = 0.0
        self._is_of_many_rows = False

    def seconds_for(self, num_rows: int, num_layers: int) -> float:
        """Returns how long rows take in layers."""
        return self._seconds_each * num_rows * num_layers

    def measured(
        self, pieces: Generator[torch.Tensor | None], num_rows: int
    ) -> Generator[torch.Tensor | None]:
        """Yields from a prefill of all layers, and takes the time of its pieces."""
        seconds = 0.0
        try:
            while True:
                began_s = perf_counter()
                piece = next(pieces, _OVER)
                seconds += perf_counter() - began_s
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
    """A prefill's rows, without the reused ones, and how far helper and model are with them."""

    slot: int
    hidden: torch.Tensor  # [rows, hidden_size]
    rotary: torch.Tensor
    added: Callable[[slice], torch.Tensor]  # [num_added, rows, hidden_size] of a chunk
    num_added: int
    num_reused: int
    chunks: list[tuple[slice, AttentionPlan]]
    scorer: AttentionScorer | None
    helper: HelperLink
    help: Help | None  # None: nothing more will come
    began_s: float = field(default_factory=perf_counter)
    came_s: float = 0.0  # when the helper's last chunk came
    num_come: int = 0  # chunks that the helper has sent
    num_scored: int = 0  # chunks that have passed the tapped layers

    def count_scored(self) -> None:
        """Counts a chunk that has passed the tapped layers; behind the last one computes scores."""
        self.num_scored += 1
        if self.scorer is not None and self.num_scored == len(self.chunks):
            self.scorer.add_scores(self.hidden, self.scorer.num_layers)

    def give_up(self) -> None:
        """Expects nothing more of the helper."""
        if self.help is not None and self.num_come < len(self.chunks):
            self.helper.abandon(self.help)
        self.help = None


def _added_to(
    added: list[tuple[torch.Tensor, torch.Tensor]], hidden: torch.Tensor, first: int, end: int
) -> torch.Tensor:
    """Returns what is added behind the first layers to the rows ``first:end`` of ``hidden``
    ``[num_added, rows, hidden_size]``: features, and zeros for other rows."""
    result = hidden.new_zeros(len(added), end - first, hidden.shape[1])
    for place, (rows, features) in zip(result, added, strict=True):
        inside = (rows >= first) & (rows < end)
        place[rows[inside] - first] = features[inside]
    return result
