"""Strategies that choose the visual tokens that the draft sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hippo.pruning.scores import VisualGrid, distinctness, normalise
from hippo.types import Pruning, PruningStrategy, SpatialScore


@dataclass(frozen=True, slots=True, eq=False)
class VisualScores:
    """The target's measurements of a prompt's visual tokens, in the order of the tokens."""

    attention: torch.Tensor | None = None  # [num_visual_tokens], mean over the tapped layers
    features: torch.Tensor | None = None  # [num_visual_tokens, hidden], projected embeddings
    alignment: torch.Tensor | None = None  # [num_visual_tokens], its change over the tapped layers


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """Choices that the papers leave open, for ablation; docs/algorithms.md gives the reasons."""

    spatial: SpatialScore = SpatialScore.CONTRAST  # HIPPO: VARIANCE
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0)  # attention, temporal, spatial
    spread: float = 0.05  # holistic: share of the kept tokens that are evenly spaced, not best
    specvlm_mass: float = 0.4  # share of the attention that Stage I keeps; as in SpecVLM's code

    def __post_init__(self) -> None:
        for name in ("spread", "specvlm_mass"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 to 1")


DEFAULT_OPTIONS = SelectionOptions()


def needs_attention(strategy: PruningStrategy) -> bool:
    """Whether the strategy chooses by the target's attention."""
    return strategy in (
        PruningStrategy.HOLISTIC,
        PruningStrategy.ATTENTION,
        PruningStrategy.SPECVLM,
    )


def needs_alignment(strategy: PruningStrategy) -> bool:
    """Whether the strategy chooses by the target's hidden states."""
    return strategy is PruningStrategy.UV


def needs_prefill(strategy: PruningStrategy) -> bool:
    """Whether the strategy chooses by what the target computes in its prefill."""
    return needs_attention(strategy) or needs_alignment(strategy)


def needs_features(strategy: PruningStrategy) -> bool:
    """Whether the strategy chooses by the visual embeddings."""
    return strategy is PruningStrategy.HOLISTIC


def default_score_layers(num_layers: int) -> int:
    return max(1, num_layers // 2)


def num_kept(num_visual_tokens: int, ratio: float) -> int:
    """Returns the number of kept tokens, ``N - floor(ratio * N)``, which is at least 1 for N > 0.

    The product is first rounded to nine decimals, so that 0.9 of 10 tokens are 9, not 8.99....
    """
    return num_visual_tokens - int(round(ratio * num_visual_tokens, 9))


def select_tokens(
    pruning: Pruning,
    visual_grids: Sequence[VisualGrid],
    num_visual_tokens: int,
    scores: VisualScores | None = None,
    options: SelectionOptions = DEFAULT_OPTIONS,
) -> torch.Tensor:
    """Returns the kept visual tokens: int64 ``[num_kept]``, ascending, on the scores' device.

    ``num_kept(num_visual_tokens, pruning.ratio)`` tokens are kept, but ``none`` keeps all tokens
    and ``blind`` keeps no token. The result depends on the arguments alone, and ties go to the
    lowest index. The function does not wait for the device. Raises ValueError when scores that the
    strategy needs are missing or have another number of tokens.

    - ``uniform``: the middle of each of ``num_kept`` equal stretches of the token sequence;
    - ``random``: a sample that depends on the seed and the number of tokens alone;
    - ``attention``: the tokens with the most attention (baseline of HIPPO and SpecVLM);
    - ``holistic``: the highest ``holistic_scores`` (HIPPO); a share of ``options.spread`` of the
      kept tokens is instead spaced evenly among the other tokens;
    - ``specvlm``: Stage I keeps the smallest set that holds ``specvlm_mass`` of the attention, at
      most ``num_kept`` tokens; Stage II adds evenly spaced other tokens, the first and the last of
      them included (SpecVLM);
    - ``uv``: the tokens whose alignment with the text grows most (ParallelVLM's UV-Prune).
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

    assert needs_prefill(strategy), strategy
    scores = scores or VisualScores()
    if needs_alignment(strategy):
        alignment = _given(scores.alignment, "alignment", strategy, num_visual_tokens)
        return _best(alignment, kept)
    attention = _given(scores.attention, "attention", strategy, num_visual_tokens)
    if strategy is PruningStrategy.SPECVLM:
        return _select_two_stages(attention, kept, options.specvlm_mass)
    if strategy is PruningStrategy.ATTENTION:
        return _best(attention, kept)
    features = _given(scores.features, "features", strategy, num_visual_tokens)
    temporal, spatial = distinctness(features, visual_grids, spatial=options.spatial)
    score = holistic_scores(attention, temporal, spatial, visual_grids, options.weights)
    best = _best(score, kept - int(options.spread * kept + 0.5))
    is_kept = torch.zeros(num_visual_tokens, dtype=torch.bool, device=score.device)
    return _fill_evenly(is_kept.index_fill_(0, best, True), kept)


def holistic_scores(
    attention: torch.Tensor,
    temporal: torch.Tensor,
    spatial: torch.Tensor,
    visual_grids: Sequence[VisualGrid],
    weights: Sequence[float] = (1.0, 1.0, 1.0),
) -> torch.Tensor:
    """Returns the weighted sum of the scores, normalised within each frame: float32 ``[N]``."""
    total = torch.zeros_like(temporal)
    for score, weight in zip((attention, temporal, spatial), weights, strict=True):
        total += weight * normalise(score, visual_grids)
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


def _best(score: torch.Tensor, kept: int) -> torch.Tensor:
    return score.sort(descending=True, stable=True).indices[:kept].sort().values


def _select_two_stages(attention: torch.Tensor, kept: int, share: float) -> torch.Tensor:
    """Applies SpecVLM's Stage I, then Stage II; the sizes of both stay on the device.

    Of M other tokens, Stage II adds n: those at ``floor(i (M - 1) / (n - 1))``, i = 0 to n - 1, as
    torch.linspace of SpecVLM's code gives them (drop_visual_tokens_specvlm, utils/utils.py).
    """
    order = attention.sort(descending=True, stable=True).indices
    reached = attention[order].double().cumsum(0)
    before = torch.nn.functional.pad(reached[:-1], (1, 0))
    is_needed = before < share * reached[-1]  # the tokens before this token do not suffice
    is_needed[kept:] = False
    is_kept = torch.empty_like(is_needed).scatter_(0, order, is_needed)
    num_gaps = (~is_kept).sum() - 1
    num_steps = kept - is_kept.sum() - 1  # -1: Stage II adds no token

    def num_before(place: torch.Tensor) -> torch.Tensor:
        return (place * num_steps + num_gaps - 1) // num_gaps.clamp(min=1)

    place = (~is_kept).cumsum(0) - 1  # place of each other token among the others
    is_added = torch.where(
        num_steps > 0, num_before(place + 1) > num_before(place), (num_steps == 0) & (place == 0)
    )
    return _marked(is_kept | ~is_kept & is_added, kept)


def _fill_evenly(is_kept: torch.Tensor, kept: int) -> torch.Tensor:
    """Returns the marked tokens and evenly spaced other tokens, ``kept`` tokens in total."""
    num_others = (~is_kept).sum()
    num_filled = kept - is_kept.sum()
    place = (~is_kept).cumsum(0)  # position of each unmarked token among the unmarked, from 1

    def num_before(place: torch.Tensor) -> torch.Tensor:
        """Returns how many middles of num_filled equal stretches lie before ``place``."""
        return (2 * num_filled * place + num_others - 1) // (2 * num_others).clamp(min=1)

    return _marked(is_kept | ~is_kept & (num_before(place) > num_before(place - 1)), kept)


def _marked(is_kept: torch.Tensor, kept: int) -> torch.Tensor:
    """Returns the indices of the ``kept`` marked tokens, ascending."""
    # A stable sort puts the kept tokens first. nonzero() would wait for the device.
    return is_kept.logical_not().to(torch.uint8).sort(stable=True).indices[:kept]
