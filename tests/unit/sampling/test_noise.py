"""The noise: the same bits everywhere, Gumbel in distribution, never infinite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.sampling.noise import hash_bits, noise_key, noise_rows, row_words
from tests.unit.sampling import reference

IDS = [0, 1000, 151_642]
# (seed, choice, completion index) -> the bits of these token ids
KNOWN_BITS = {
    (0, 0, 0): [0x219FF9A4E60A5, 0x12C0212C6A073, 0xB2696420AEAF9],
    (2**64 - 1, 2**32 - 1, 32767): [0xC8DF6AC225832, 0xF7CFF17B21213, 0x270BC48585555],
}


def gumbel_noise(
    seed: int, choice_index: int, index: int, num_ids: int, device: str = "cpu"
) -> torch.Tensor:
    return noise_rows(noise_key(seed, choice_index), (index,), num_ids, device)[0]


def bits_of(seed: int, choice_index: int, index: int, num_ids: int, device: str) -> torch.Tensor:
    words = torch.tensor([row_words(noise_key(seed, choice_index), index)], device=device)
    return hash_bits(words, num_ids)[0].cpu()


@pytest.mark.parametrize("where", KNOWN_BITS)
def test_bits_are_the_known_ones(where: tuple[int, int, int], device: str) -> None:
    assert [reference.bits(*where, token_id) for token_id in IDS] == KNOWN_BITS[where]
    assert bits_of(*where, 151_643, device)[IDS].tolist() == KNOWN_BITS[where]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    choice_index=st.integers(0, 2**32 - 1),
    index=st.integers(0, 2**31 - 1),
)
def test_bits_equal_the_plain_implementation(seed: int, choice_index: int, index: int) -> None:
    expected = [reference.bits(seed, choice_index, index, token_id) for token_id in range(70)]
    assert bits_of(seed, choice_index, index, 70, "cpu").tolist() == expected


def test_noise_equals_the_plain_implementation(device: str) -> None:
    noise = gumbel_noise(7, 2, 9, 100, device)
    expected = [reference.noise(7, 2, 9, token_id) for token_id in range(100)]
    torch.testing.assert_close(noise.cpu(), torch.tensor(expected, dtype=torch.float64))


def test_noise_follows_the_gumbel_distribution_over_ids_indices_and_seeds() -> None:
    over_ids = gumbel_noise(11, 0, 0, 100_000)
    over_indices = noise_rows(noise_key(11, 0), range(20_000), 2, "cpu")[:, 1]
    over_seeds = torch.stack([gumbel_noise(seed, 0, 0, 2)[1] for seed in range(5_000)])
    for sample in (over_ids, over_indices, over_seeds):
        assert bool(sample.isfinite().all())
        # Kolmogorov and Smirnov's distance, which exceeds 1.95 / sqrt(n) once in a thousand times.
        expected = torch.exp(-torch.exp(-sample.double().sort().values))
        steps = torch.arange(len(sample) + 1) / len(sample)
        distance = max((expected - steps[:-1]).max(), (steps[1:] - expected).max())
        assert distance < 1.95 / math.sqrt(len(sample))


def test_neighbouring_seeds_choices_and_indices_are_uncorrelated() -> None:
    base = gumbel_noise(5, 0, 3, 50_000)
    for other in (
        gumbel_noise(6, 0, 3, 50_000),
        gumbel_noise(5, 1, 3, 50_000),
        gumbel_noise(5, 0, 4, 50_000),
        base.roll(1),
    ):
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1]
        assert abs(float(correlation)) < 0.025  # 5 standard deviations and more
