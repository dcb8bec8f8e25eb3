"""The rule's filters, ties, penalties and extremes, against plain Python."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.errors import HippoError
from hippo.sampling.rule import choose_tokens, keep_mask, penalise, propose_tokens
from hippo.sampling.sampler import TokenSampler
from hippo.speculation.sharpness import SHARPNESSES
from hippo.types import SamplingParams
from tests.unit.sampling import reference
from tests.unit.sampling.test_sampler import NUM_IDS, PARAMS, TOKEN_IDS, logits_of, sample

# Multiples of 1/8, so that ties are frequent; no top_p below is a ratio of small numbers, so that
# no sum lies within rounding of it.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=24)

BITS = st.lists(st.integers(0, 1), max_size=6)


def scaled_rows(rows: list[list[float]], temperature: float = 1.0) -> torch.Tensor:
    logits = torch.tensor(rows, dtype=torch.float64)
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def kept_ids(row: list[float], params: SamplingParams) -> list[int]:
    mask = keep_mask(scaled_rows([row]), params)
    return list(range(len(row))) if mask is None else mask[0].nonzero().flatten().tolist()


@settings(deadline=None)
@given(
    row=LOGITS,
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([1.0, 0.999, 0.9037, 0.617, 0.3013, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.0317, 0.5003, 1.0]),
)
def test_filters_equal_the_plain_implementation(
    row: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(kept_ids(row, params)) == reference.survivors(scaled_rows([row])[0].tolist(), params)


def test_filters_of_a_large_vocabulary_do_not_overflow(device: str) -> None:
    flat = torch.zeros(1, 152_064, dtype=torch.float64, device=device)
    mask = keep_mask(flat, SamplingParams(top_p=0.25))
    assert mask is not None and int(mask.sum()) == 152_064 // 4


@settings(deadline=None)
@given(params=PARAMS, row=LOGITS, prompt=BITS, output=BITS)
def test_penalties_equal_the_plain_implementation(
    params: SamplingParams, row: list[float], prompt: list[int], output: list[int]
) -> None:
    params = dataclasses.replace(params, logit_bias=((1, 2.5), (0, -100.0)))
    mask = torch.zeros(len(row), dtype=torch.bool)
    mask[prompt] = True
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(row))[None]
    bias = torch.tensor([-100.0, 2.5] + [0.0] * (len(row) - 2))
    actual = penalise(torch.tensor([row]), params, prompt_mask=mask, counts=counts, bias=bias)
    expected = reference.penalised(torch.tensor(row), params, prompt, output)
    torch.testing.assert_close(actual[0], torch.tensor(expected))


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_uniform() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-6, -3e38, 0.5]])
    for temperature in (5e-324, 1e-30, 1e-9):
        sampler = TokenSampler(SamplingParams(temperature=temperature, seed=4), [], 4)
        for index in range(20):
            assert sample(sampler, logits, [0] * index) == [1]
    sampler = TokenSampler(SamplingParams(temperature=1e300, seed=4), [], 4)
    for index in range(20):
        noise = [reference.noise(4, 0, index, token_id) for token_id in range(4)]
        best = noise.index(max(noise))
        assert sample(sampler, logits, [0] * index) == [best]


@pytest.mark.parametrize("num_ids", [2, 40, 1000, 5000, 152_064])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_lowest_id_wins_a_tie_of_a_target_and_of_a_draft(
    num_ids: int, temperature: float, device: str
) -> None:
    """Of logits in bfloat16, which have few values, and of a draft's second choices too."""
    params = SamplingParams(temperature=temperature)
    noise = torch.zeros(4, num_ids, dtype=torch.float64, device=device)
    for seed in range(10):
        random = torch.Generator().manual_seed(seed)
        logits = torch.randn(4, num_ids, generator=random).clamp(max=1.5).bfloat16()
        logits = logits.float().to(device)
        first = choose_tokens(logits, params, noise=noise)
        others = logits.scatter(1, first[:, None], -math.inf)
        second = choose_tokens(others, params, noise=noise)
        assert first.tolist() == [row.index(max(row)) for row in logits.tolist()]
        for place in range(len(SHARPNESSES) if temperature else 1):
            found = propose_tokens(logits, params, sharpness_place=place, noise=noise)
            assert torch.equal(found[:, 0], first)
            assert torch.equal(found[:, 1], second)
            assert all(torch.equal(choices, first) for choices in found[:, 4:].T)


def test_float32_extremes_and_excluded_ids_are_sampled_without_infinity(device: str) -> None:
    largest = torch.finfo(torch.float32).max
    rows = torch.tensor(
        [
            [largest, -largest, 0.0, largest],
            [-largest, -largest, -math.inf, -largest],
            [-math.inf, -math.inf, 0.0, -math.inf],
            [1e-45, 0.0, -1e-45, -math.inf],
        ],
        device=device,
    )
    params = SamplingParams(temperature=0.7, top_k=3, top_p=0.95, min_p=0.01, seed=1)
    sampler = TokenSampler(params, [], 4, device)
    for index in range(30):
        ids = sample(sampler, rows, [0] * index, [1, 1, 1])
        assert ids[0] in (0, 3)
        assert ids[1] in (0, 1, 3)
        assert ids[2] == 2
        assert ids[3] in (0, 1, 2)


@pytest.mark.parametrize(
    "row",
    [
        [0.0, math.nan, 1.0],
        [0.0, math.inf, 1.0],
        [-math.inf, -math.inf, -math.inf],
        [math.nan, math.inf, -math.inf],
    ],
)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((1, 1.0),)),
    ],
)
@pytest.mark.parametrize("proposes", [False, True])
def test_unusable_logits_raise_a_clear_internal_error(
    row: list[float], params: SamplingParams, proposes: bool, device: str
) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], row], device=device)
    sampler = TokenSampler(params, [0], 3, device, proposes=proposes)
    with pytest.raises(HippoError, match=r"logits are not usable \(NaN") as caught:
        sample(sampler, logits, [], [1])
    assert caught.value.http_status == 500


@settings(max_examples=150, deadline=None)
@given(
    params=PARAMS,
    prompt=st.lists(TOKEN_IDS, max_size=5),
    output=st.lists(TOKEN_IDS, max_size=8),
    seed=st.integers(0, 2**31),
)
def test_a_token_equals_the_plain_implementation(
    params: SamplingParams, prompt: list[int], output: list[int], seed: int
) -> None:
    logits = logits_of(1, seed)
    before = logits.clone()
    actual = sample(TokenSampler(params, prompt, NUM_IDS), logits, output)
    assert actual == [reference.token(logits[0], params, prompt, output)]
    assert torch.equal(logits, before), "the given logits stay as they are"
