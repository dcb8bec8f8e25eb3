"""What the sampler draws: the filtered softmax, and as much agreement as coupling promises."""

import pytest
import torch

from hippo.sampling.noise import noise_key, noise_rows
from hippo.sampling.rule import choose_tokens, keep_mask
from hippo.types import SamplingParams


def draw(logits: torch.Tensor, params: SamplingParams, num_draws: int) -> torch.Tensor:
    """Tokens of ``num_draws`` completion indices that share one row of logits."""
    noise = noise_rows(noise_key(params.seed, 0), range(num_draws), logits.shape[0], "cpu")
    return choose_tokens(logits.expand(num_draws, -1), params, noise=noise)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.6, seed=2),
        SamplingParams(temperature=1.8, seed=3),
        SamplingParams(temperature=1.0, top_k=9, seed=4),
        SamplingParams(temperature=1.0, top_p=0.8, seed=5),
        SamplingParams(temperature=1.0, min_p=0.1, seed=6),
        SamplingParams(temperature=1.2, top_k=30, top_p=0.9, min_p=0.02, seed=7),
    ],
)
def test_draws_follow_the_filtered_softmax(params: SamplingParams) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 1.5
    num_draws = 40_000
    scaled = (logits - logits.max()).double() / params.temperature
    mask = keep_mask(scaled[None], params)
    if mask is not None:
        scaled = scaled.masked_fill(~mask[0], -torch.inf)
    expected = scaled.softmax(dim=-1) * num_draws
    observed = torch.bincount(draw(logits, params, num_draws), minlength=40)
    assert int(observed[expected == 0].sum()) == 0
    is_common = expected >= 5
    counts = observed[is_common].double()
    shares = expected[is_common]
    rest = num_draws - shares.sum()
    if rest > 1:
        counts = torch.cat([counts, num_draws - counts.sum(dim=0, keepdim=True)])
        shares = torch.cat([shares, rest[None]])
    shares = shares * counts.sum() / shares.sum()
    chi_square = ((counts - shares) ** 2 / shares).sum()
    freedom = torch.tensor(len(counts) - 1.0, dtype=torch.float64)
    assert torch.special.gammaincc(freedom / 2, chi_square / 2) > 1e-3  # the p-value


@pytest.mark.parametrize("closeness", [0.3, 0.6, 1.0])
def test_two_draws_with_shared_noise_agree_nearly_as_often_as_any_scheme_can(
    closeness: float,
) -> None:
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(200, generator=generator) * 3
    draft = target + torch.randn(200, generator=generator) * closeness
    params = SamplingParams(temperature=1.0, seed=12)
    num_draws = 10_000
    agreement = (draw(target, params, num_draws) == draw(draft, params, num_draws)).double().mean()
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    distance = 0.5 * (p - q).abs().sum()
    best = float(1 - distance)
    guaranteed = float((1 - distance) / (1 + distance))  # Daliri et al. 2024, theorem 4
    noise = 5 * (0.25 / num_draws) ** 0.5
    assert guaranteed - noise <= float(agreement) <= best + noise
