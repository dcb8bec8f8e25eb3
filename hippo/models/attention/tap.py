"""Computes scores of visual tokens from the queries that a prefill's taps have kept, or from the
hidden states between its layers."""

from abc import ABC, abstractmethod
from dataclasses import replace
from time import perf_counter_ns

import torch

from hippo.catalog.sizes import SCORED_ROWS
from hippo.models.attention.cache import KeyValueCache
from hippo.models.attention.parts import AttentionPlan, QueryTap
from hippo.models.interface.base import AttentionTap, Prompt
from hippo.models.interface.transfer import to_device
from hippo.pruning.scores import alignment, attention_scores


def scored_rows(tap: AttentionTap, prompt: Prompt) -> torch.Tensor:
    """Returns the prompt's rows that score the visual tokens (int64, ascending): the rows of the
    tap's text, or SCORED_ROWS evenly spaced rows of a long text, with its first and last row."""
    text = prompt.question_indices
    if tap.scope == "causal":
        text = torch.arange(int(prompt.visual_indices[-1]) + 1, prompt.length)
        text = text[~torch.isin(text, prompt.other_indices)]
    num_rows = text.shape[0]
    if num_rows <= SCORED_ROWS:
        return text
    return text[torch.arange(SCORED_ROWS) * (num_rows - 1) // (SCORED_ROWS - 1)]


def most_reused(tap: AttentionTap, prompt: Prompt) -> int:
    """Returns how many of a prompt's first rows a tapped prefill may reuse: scores need the text's
    queries, and alignment also the hidden states of the visual tokens."""
    needed = [scored_rows(tap, prompt)]
    if tap.is_alignment:
        needed.append(prompt.visual_indices)
    return min(int(rows[0]) for rows in needed)


class Scorer(ABC):
    """Computes what one prefill's tap asks for, while the prefill runs.

    ``visual`` and ``text`` are indices in the prompt of the visual tokens and of the rows that
    score them, on the device. They are copied before any layer is queued, because a later copy
    would wait for the queued layers.
    """

    def __init__(
        self, tap: AttentionTap, prompt: Prompt, num_reused: int, device: torch.device
    ) -> None:
        assert num_reused <= most_reused(tap, prompt)
        self.num_layers = tap.num_layers
        self._tap = tap
        self._num_reused = num_reused
        self._text_on_host = scored_rows(tap, prompt)
        self._visual = to_device(prompt.visual_indices, device)
        self._text = to_device(self._text_on_host, device)
        self._scores: list[torch.Tensor] = []

    def tapped(self, rows: slice, step: AttentionPlan) -> AttentionPlan:
        """Returns the step of a chunk with a tap; ``rows`` are the chunk's rows among the rows that
        the prefill runs."""
        return step

    def add_scores(self, hidden: torch.Tensor, last_layer: int) -> None:
        """Called when all rows have passed the layers up to ``last_layer``; ``hidden`` holds the
        rows that the prefill runs. Sets the tap's scores behind its last layer."""
        began_ns = perf_counter_ns()
        self._measure(hidden, last_layer)
        self._tap.score_ns += perf_counter_ns() - began_ns

    @abstractmethod
    def _measure(self, hidden: torch.Tensor, last_layer: int) -> None:
        """See add_scores."""


class AttentionScorer(Scorer):
    """Scores by attention, from the queries that are kept of one group of layers at a time. Of the
    first ``num_layers`` layers (None: the tap's), ``num_scoring`` attend (None: all)."""

    def __init__(
        self,
        tap: AttentionTap,
        prompt: Prompt,
        num_reused: int,
        cache: KeyValueCache,
        slot: int,
        scaling: float,
        *,
        num_layers: int | None = None,
        num_scoring: int | None = None,
    ) -> None:
        super().__init__(tap, prompt, num_reused, cache.device)
        self.num_layers = num_layers or tap.num_layers
        self._num_scoring = num_scoring or self.num_layers
        self._length = prompt.length
        self._cache = cache
        self._slot = slot
        self._scaling = scaling
        self._queries: dict[int, list[torch.Tensor]] = {}  # see QueryTap

    def tapped(self, rows: slice, step: AttentionPlan) -> AttentionPlan:
        """See Scorer.tapped."""
        own = self.text_in(rows)
        if not own.shape[0]:
            return step
        return replace(step, tap=QueryTap(to_device(own, self._cache.device), self._queries))

    def text_in(self, rows: slice) -> torch.Tensor:
        """Returns the tapped rows of a chunk (int64, on the CPU), counted from its first row."""
        text = self._text_on_host - self._num_reused
        own: torch.Tensor = text[(text >= rows.start) & (text < rows.stop)] - rows.start
        return own

    def add_queries(self, queries: torch.Tensor) -> None:
        """Adds queries ``[num_tapped_layers, rows, num_heads, head_dim]`` that another device
        computed of a chunk's tapped rows, as ``tapped`` keeps those computed here."""
        for layer, of_layer in enumerate(queries):
            self._queries.setdefault(layer, []).append(of_layer)

    def _measure(self, hidden: torch.Tensor, last_layer: int) -> None:
        keys, _ = self._cache.seen(self._slot, self._length)
        for layer in sorted(self._queries):
            layer_scores = attention_scores(
                torch.cat(self._queries.pop(layer)),
                keys[layer][:, 0],
                scaling=self._scaling,
                visual=self._visual,
                scope=self._tap.scope,
                rows=self._text,
            )
            self._scores.append(layer_scores)
            if len(self._scores) == self._num_scoring:
                self._tap.layer_scores = torch.stack(self._scores)


class AlignmentScorer(Scorer):
    """Scores by the change of alignment from the embeddings to the tap's last layer."""

    def _measure(self, hidden: torch.Tensor, last_layer: int) -> None:
        if last_layer not in (0, self.num_layers):
            return
        visual, text = self._visual - self._num_reused, self._text - self._num_reused
        self._scores.append(alignment(hidden, visual, text))
        if last_layer:
            self._tap.layer_scores = (self._scores[1] - self._scores[0])[None]
