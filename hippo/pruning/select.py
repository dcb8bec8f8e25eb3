"""Strategies that choose the visual tokens the draft sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hippo.pruning.scores import Normalisation, VisualGrid, distinctness, normalise
from hippo.types import Pruning, PruningStrategy, SpatialScore

_NEED_FEATURES = frozenset({PruningStrategy.HOLISTIC, PruningStrategy.HYBRID})
_NEED_ATTENTION = _NEED_FEATURES | {PruningStrategy.ATTENTION, PruningStrategy.SPECVLM}


@dataclass(frozen=True, slots=True, eq=False)
class VisualScores:
    """What the target has found out about a prompt's visual tokens, in their order."""

    attention: torch.Tensor | None = None  # [num_visual_tokens], mean over the tapped layers
    features: torch.Tensor | None = None  # [num_visual_tokens, hidden], the projected embeddings


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """What the papers leave open, for ablation; the defaults are docs/algorithms.md's."""

    spatial: SpatialScore = "contrast"  # "variance" is HIPPO's
    crop: int = 5  # rows and columns of the window of the spatial score
    normalisation: Normalisation = "min-max"
    per_frame: bool = False  # attention, holistic: an equal share of every frame, not the best
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of attention, temporal, spatial
    spread: float = 0.05  # holistic: share of the kept ones that are spread evenly over the rest
    specvlm_mass: float = 0.4  # share of the attention that Stage I keeps; as in SpecVLM's code

    def __post_init__(self) -> None:
        """Raises ValueError for a share outside 0 to 1."""
        for name in ("spread", "specvlm_mass"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 to 1")


DEFAULT_OPTIONS = SelectionOptions()


def needs_attention(strategy: PruningStrategy) -> bool:
    """Whether the strategy chooses by the target's attention."""
    return strategy in _NEED_ATTENTION


def needs_features(strategy: PruningStrategy) -> bool:
    """Whether the strategy chooses by the visual embeddings."""
    return strategy in _NEED_FEATURES


def default_score_layers(num_layers: int) -> int:
    """How many of a target's layers score visual tokens unless the operator says."""
    return max(1, num_layers // 2)


def num_kept(num_visual_tokens: int, ratio: float) -> int:
    """How many of the tokens stay: ``N - floor(ratio * N)``, so at least one if there is one.

    The product is rounded to nine decimals first: 0.9 of 10 tokens are 9, not 8.99....
    """
    return num_visual_tokens - int(round(ratio * num_visual_tokens, 9))


def select_tokens(
    pruning: Pruning,
    visual_grids: Sequence[VisualGrid],
    num_visual_tokens: int,
    scores: VisualScores | None = None,
    options: SelectionOptions = DEFAULT_OPTIONS,
) -> torch.Tensor:
    """The kept visual tokens: int64 ``[num_kept]``, ascending, where the scores are.

    ``num_kept(num_visual_tokens, pruning.ratio)`` of them, but ``none`` keeps all and ``blind``
    none; what is kept is a function of the arguments alone, and of equal tokens the first stays.
    Nothing waits for the device. Raises ValueError when scores that the strategy needs are
    missing or of another number of tokens.

    - ``uniform``: the middle of each of ``num_kept`` equal stretches of the token sequence;
    - ``random``: a sample that depends on the seed and the number of tokens alone;
    - ``attention``: the most attended to (HIPPO's and SpecVLM's baseline);
    - ``holistic``: the highest ``holistic_scores`` (HIPPO), but for ``options.spread`` of them,
      which are evenly spaced ones of the others;
    - ``specvlm``: Stage I, the smallest set that holds ``specvlm_mass`` of the attention, at most
      ``num_kept``; Stage II fills up with evenly spaced ones of the others (SpecVLM);
    - ``hybrid``: the highest ``holistic_scores`` of each frame, as many as the frame's share of
      its video's change: the sum of its tokens' temporal distinctness, from ``scores.features``
      (the target's, unless the caller gives others, such as the draft's). Frames that do not
      change come last.
    """
    total = sum(frames * rows * columns for frames, rows, columns in visual_grids)
    assert total == num_visual_tokens, (visual_grids, num_visual_tokens)
    strategy = pruning.strategy
    kept = num_kept(num_visual_tokens, pruning.ratio)
    if strategy is PruningStrategy.NONE:
        return torch.arange(num_visual_tokens)
    if strategy is PruningStrategy.BLIND or num_visual_tokens == 0:
        return torch.empty(0, dtype=torch.int64)
    if strategy is PruningStrategy.UNIFORM:
        # (2i + 1) N / 2k in whole numbers: exact, strictly increasing, below N.
        return (2 * torch.arange(kept) + 1) * num_visual_tokens // max(1, 2 * kept)
    if strategy is PruningStrategy.RANDOM:
        generator = torch.Generator().manual_seed(pruning.seed % 2**63)
        order = torch.randperm(num_visual_tokens, generator=generator)
        return order[:kept].sort().values

    assert needs_attention(strategy), strategy
    scores = scores or VisualScores()
    attention = _given(scores.attention, "attention", strategy, num_visual_tokens)
    if strategy is PruningStrategy.SPECVLM:
        return _select_two_stages(attention, kept, options.specvlm_mass)
    if strategy is PruningStrategy.ATTENTION:
        score, temporal = attention, None
    else:
        features = _given(scores.features, "features", strategy, num_visual_tokens)
        temporal, spatial = distinctness(
            features, visual_grids, crop=options.crop, spatial=options.spatial
        )
        score = holistic_scores(attention, temporal, spatial, visual_grids, options)
    if strategy is PruningStrategy.HYBRID:
        assert temporal is not None
        return _select_by_frame(score, temporal, visual_grids, kept)
    num_spread = int(options.spread * kept + 0.5) if strategy is PruningStrategy.HOLISTIC else 0
    num_best = kept - num_spread
    if options.per_frame:
        best = _select_by_frame(score, torch.ones_like(score), visual_grids, num_best)
    else:
        best = _first(_by_score(score), num_best)
    if num_spread == 0:
        return best
    is_kept = torch.zeros(num_visual_tokens, dtype=torch.bool, device=score.device)
    return _fill_evenly(is_kept.index_fill_(0, best, True), kept)


def holistic_scores(
    attention: torch.Tensor,
    temporal: torch.Tensor,
    spatial: torch.Tensor,
    visual_grids: Sequence[VisualGrid],
    options: SelectionOptions = DEFAULT_OPTIONS,
) -> torch.Tensor:
    """The weighted sum of the three scores, each normalised within its frame: float32 ``[N]``."""
    total = torch.zeros_like(temporal)
    for score, weight in zip((attention, temporal, spatial), options.weights, strict=True):
        total += weight * normalise(score, visual_grids, options.normalisation)
    return total


def _given(
    values: torch.Tensor | None, name: str, strategy: PruningStrategy, num_visual_tokens: int
) -> torch.Tensor:
    if values is None:
        raise ValueError(f"the strategy {strategy.value!r} needs scores.{name}; there is none")
    if values.shape[0] != num_visual_tokens:
        raise ValueError(
            f"scores.{name} is of {values.shape[0]} tokens; the prompt has {num_visual_tokens}"
        )
    return values


def _by_score(score: torch.Tensor) -> torch.Tensor:
    return score.sort(descending=True, stable=True).indices


def _first(order: torch.Tensor, kept: int) -> torch.Tensor:
    return order[:kept].sort().values


def _select_by_frame(
    score: torch.Tensor, share: torch.Tensor, visual_grids: Sequence[VisualGrid], kept: int
) -> torch.Tensor:
    """The best of each frame, their number in proportion to the sum of ``share`` in the frame.

    Shares are of the frame's own video, whose frames together count for as much as it has tokens:
    a still video beside a lively one keeps its part, evenly. Apportioned by Webster's method,
    which is one sort: the token ranked ``j`` in its frame stands at ``(j + 1/2) / share of the
    frame``, and the first ``kept`` are taken. A frame cannot give more tokens than it has, and
    none are left over. Of tokens that stand at the same place the one with the higher score comes
    first.
    """
    places = []
    start = 0
    for frames, rows, columns in visual_grids:
        size = rows * columns
        part = slice(start, start + frames * size)
        start = part.stop
        order = score[part].view(frames, size).sort(dim=1, descending=True, stable=True).indices
        rank = torch.arange(size, device=score.device).expand(frames, size)
        rank = torch.empty_like(order).scatter_(1, order, rank)
        budget = share[part].double().view(frames, size).sum(1, keepdim=True)
        total = budget.sum()
        budget = torch.where(total > 0, budget * (frames * size) / total, float(size))
        places.append(((rank.double() + 0.5) / budget).flatten())
    order = _by_score(score)
    return _first(order[torch.cat(places)[order].sort(stable=True).indices], kept)


def _select_two_stages(attention: torch.Tensor, kept: int, share: float) -> torch.Tensor:
    """SpecVLM's Stage I, then Stage II; the sizes of both stay on the device."""
    order = _by_score(attention)
    reached = attention[order].double().cumsum(0)
    before = torch.nn.functional.pad(reached[:-1], (1, 0))
    is_needed = before < share * reached[-1]  # what stands before a token does not suffice
    is_needed[kept:] = False
    return _fill_evenly(torch.empty_like(is_needed).scatter_(0, order, is_needed), kept)


def _fill_evenly(is_kept: torch.Tensor, kept: int) -> torch.Tensor:
    """The marked tokens, and as many evenly spaced ones of the others as makes ``kept``."""
    num_others = (~is_kept).sum()
    num_filled = kept - is_kept.sum()
    place = (~is_kept).cumsum(0)  # of each of the others among them, from 1

    def num_before(place: torch.Tensor) -> torch.Tensor:
        """How many middles of num_filled equal stretches lie before a place, in whole numbers."""
        return (2 * num_filled * place + num_others - 1) // (2 * num_others).clamp(min=1)

    is_kept = is_kept | ~is_kept & (num_before(place) > num_before(place - 1))
    # The kept ones first, both in order: nonzero() would wait for the device to learn the size.
    return is_kept.logical_not().to(torch.uint8).sort(stable=True).indices[:kept]
