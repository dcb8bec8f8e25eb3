"""A sequence of the target service, whose prefill also scores the visual tokens."""

from dataclasses import dataclass, replace

from hippo.engine.sequence import EngineSequence, Job, SequenceHost
from hippo.engine.slots import SlotPool
from hippo.errors import InvalidRequestError, ModelLoadError
from hippo.models.attention.tap import most_reused
from hippo.models.interface.base import (
    AttentionTap,
    Prompt,
    VideoLanguageModel,
    prunable_embeddings,
)
from hippo.models.interface.content import has_visual_from
from hippo.pruning.select import (
    DEFAULT_OPTIONS,
    SelectionOptions,
    default_score_layers,
    needs_alignment,
    needs_features,
)
from hippo.speculation.verifier import Verifier
from hippo.types import TARGET_ONLY, Hold, OpenRequest, PromptInfo, Pruning
from services.target.selection import (
    ScoredSelection,
    bounded_pruning,
    needs_scores,
    select_without_scores,
    tap_for,
)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How visual tokens are scored and chosen: the first ``score_layers`` layers score the tokens
    (None: half of the model's layers), and ``options`` configure the choice by the scores."""

    score_layers: int | None = None
    options: SelectionOptions = DEFAULT_OPTIONS

    def num_layers_for(self, model: VideoLanguageModel, pruning: Pruning | None = None) -> int:
        """Returns how many layers score, by default or for a request's ``pruning``.

        Raises ModelLoadError if the model has fewer layers than the setting says, and
        InvalidRequestError for ``uv`` with all layers.
        """
        share = None if pruning is None else pruning.score_layer_share
        if share is None:
            wanted = self.score_layers or default_score_layers(model.num_layers)
        else:
            wanted = max(1, round(share * model.num_layers))
        if wanted > model.num_layers:
            raise ModelLoadError(
                f"--score-layers is {self.score_layers}, but {model.info.name} has "
                f"{model.num_layers}"
            )
        if pruning is not None and needs_alignment(pruning.strategy) and wanted == model.num_layers:
            raise InvalidRequestError(
                f"uv scores by hidden states, which the last of the {model.num_layers} layers "
                "computes for the last token only: let fewer layers score "
                "(pruning.score_layer_share, or --score-layers of the target)",
                param="pruning.score_layer_share",
            )
        return wanted

    def options_for(self, pruning: Pruning) -> SelectionOptions:
        """Returns the options of a request, which override the service's."""
        own = self.options
        spread = own.spread if pruning.spread is None else pruning.spread
        return replace(own, spatial=pruning.spatial_score or own.spatial, spread=spread)


class TargetSequence(EngineSequence):
    """One sequence and its verifier."""

    def __init__(self, request: OpenRequest, slots: SlotPool, *, scoring: Scoring) -> None:
        if request.committed_ids:
            raise InvalidRequestError(
                "committed_ids is for a draft that joins; the target begins at token 0",
                param="committed_ids",
            )
        verifier = Verifier(
            max_tokens=request.max_tokens,
            end_token_ids=request.end_token_ids,
            pace=request.pace,
        )
        super().__init__(request, slots, verifier, num_top_logprobs=request.num_top_logprobs)
        self._scoring = scoring

    def announce_prompt(self, info: PromptInfo, prompt: Prompt) -> None:
        """Also sends a selection that needs no scores, before any device work."""
        super().announce_prompt(info, prompt)
        request = self.request
        pruning = bounded_pruning(request.pruning, prompt, request.max_tokens)
        self.request = replace(request, pruning=pruning)
        if not needs_scores(pruning, int(prompt.visual_indices.shape[0])):
            self.output.put_item(select_without_scores(pruning, prompt))

    def begin_prefill(self, host: SequenceHost) -> None:
        host.start_job(self, self._prefill(host))

    def _prefill(self, host: SequenceHost) -> Job:
        pruning, model = self.request.pruning, host.model
        is_scored = needs_scores(pruning, int(self.prompt.visual_indices.shape[0]))
        tap = most = None
        if is_scored:
            tap = tap_for(pruning, self._scoring.num_layers_for(model, pruning))
            most = most_reused(tap, self.prompt)
        num_reused = host.take_over_rows(self, self.rows, most=most)
        if host.is_alone and self.request.pace != TARGET_ONLY:
            bare = self.prompt.without_pixels()
            self.help = model.begin_help(self.slot, bare, tap, num_reused)
            if self.help is not None and is_scored:
                host.emit_message(self, Hold())
        try:
            yield from self._run_prefill(host, pruning, tap, num_reused)
        finally:
            if self.help is not None:
                self.help.close()
                self.help = None  # frees the prompt's rows

    def _run_prefill(
        self, host: SequenceHost, pruning: Pruning, tap: AttentionTap | None, num_reused: int
    ) -> Job:
        model = host.model
        needs_visual = tap is not None and needs_features(pruning.strategy)
        visual = yield from self.run_tower(
            host, is_needed=needs_visual or has_visual_from(self.prompt, num_reused)
        )
        selection = None
        if tap is not None:
            selection = ScoredSelection(
                pruning,
                self.prompt,
                None if visual is None else prunable_embeddings(model, self.prompt, visual),
                tap=tap,
                options=self._scoring.options_for(pruning),
            )
        if self.help is not None:
            pieces = self.help.run()
        else:
            pieces = model.prefill(self.slot, self.prompt, visual, None, tap, num_reused)
        visual = None
        logits = yield from self.run_prefill(
            pieces, after_piece=lambda: self._tell_selection(host, selection)
        )
        self._tell_selection(host, selection, is_last=True)
        host.finish_prefill(self, logits, rows=self.rows, num_reused=num_reused)

    def _tell_selection(
        self, host: SequenceHost, selection: ScoredSelection | None, *, is_last: bool = False
    ) -> None:
        message = None if selection is None else selection.take_selection(is_last=is_last)
        if message is not None:
            host.emit_message(self, message)
