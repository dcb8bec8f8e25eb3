"""The sampler with a memory: blocks equal single rows, whatever came before; log-probabilities are
of the logits as they came."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.errors import HippoError
from hippo.sampling import sampler as sampler_module
from hippo.sampling.sampler import SampleRequest, TokenSampler, sample_step
from hippo.types import SamplingParams

NUM_IDS = 23
TOKEN_IDS = st.integers(0, NUM_IDS - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (4, -2.0))]),
    seed=st.integers(0, 2**64 - 1),
    choice_index=st.integers(0, 2),
    min_tokens=st.sampled_from([0, 0, 3, 8]),
)
END_IDS = (2, 5)
HISTORIES = st.lists(
    st.tuples(st.lists(TOKEN_IDS, max_size=12), st.lists(TOKEN_IDS, max_size=6)),
    min_size=1,
    max_size=6,
)


def logits_of(num_rows: int, seed: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, NUM_IDS, generator=generator) * 2).to(device)


def sample(
    sampler: TokenSampler,
    logits: torch.Tensor,
    output_ids: Sequence[int] = (),
    draft_ids: Sequence[int] = (),
) -> list[int]:
    """One sequence's tokens alone."""
    [(token_ids, _)] = sample_step([SampleRequest(sampler, output_ids, draft_ids)], logits)
    return token_ids


@settings(max_examples=80, deadline=None)
@given(params=PARAMS, prompt=st.lists(TOKEN_IDS, max_size=6), histories=HISTORIES)
def test_a_block_equals_its_rows_one_by_one_after_any_steps_and_rollbacks(
    params: SamplingParams, prompt: list[int], histories: list[tuple[list[int], list[int]]]
) -> None:
    kept = TokenSampler(params, prompt, NUM_IDS, end_token_ids=END_IDS)
    for step, (output, draft) in enumerate(histories):
        logits = logits_of(len(draft) + 1, step)
        block = sample(kept, logits, output, draft)
        for row in range(len(draft) + 1):
            history = output + draft[:row]
            fresh = TokenSampler(params, prompt, NUM_IDS, end_token_ids=END_IDS)
            alone = sample(fresh, logits[row : row + 1], history)
            assert alone == [block[row]]
            assert len(history) >= params.min_tokens or block[row] not in END_IDS


def test_a_block_equals_its_rows_one_by_one_on_every_device(device: str) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.2
    )
    draft = [int(i) for i in torch.randint(NUM_IDS, (15,), generator=torch.manual_seed(0))]
    logits = logits_of(16, 9, device)
    kept = TokenSampler(params, [1, 2], NUM_IDS, device)
    block = sample(kept, logits, [], draft)
    for row in range(16):
        alone = sample(kept, logits[row : row + 1], draft[:row])
        assert alone == [block[row]]


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(
        st.tuples(PARAMS, st.lists(TOKEN_IDS, max_size=5), st.lists(TOKEN_IDS, max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_sequences_with_different_parameters_share_a_step(
    parts: list[tuple[SamplingParams, list[int], list[int]]],
) -> None:
    logits = logits_of(sum(len(draft) + 1 for _, _, draft in parts), 5)
    requests = [
        SampleRequest(TokenSampler(params, [1], NUM_IDS, end_token_ids=END_IDS), output, draft)
        for params, output, draft in parts
    ]
    together = sample_step(requests, logits)
    start = 0
    for (token_ids, _), (params, output, draft) in zip(together, parts, strict=True):
        sampler = TokenSampler(params, [1], NUM_IDS, end_token_ids=END_IDS)
        end = start + len(draft) + 1
        assert token_ids == sample(sampler, logits[start:end], output, draft)
        start = end


def test_an_end_token_is_chosen_from_min_tokens_on_and_not_before_even_if_biased() -> None:
    params = SamplingParams(min_tokens=3, logit_bias=((7, 100.0),))
    sampler = TokenSampler(params, [], NUM_IDS, end_token_ids=[7])
    logits = logits_of(6, 3)
    before = logits.clone()
    chosen = sample(sampler, logits, [], [0, 0, 0, 0, 0])
    assert [token_id == 7 for token_id in chosen] == [False] * 3 + [True] * 3
    assert torch.equal(logits, before)
    likeliest = logits.index_fill(1, torch.tensor([7]), float("-inf")).argmax(1)
    assert chosen[:3] == likeliest[:3].tolist()


def test_greedy_sequences_that_are_past_min_tokens_are_plain_again() -> None:
    sampler = TokenSampler(SamplingParams(min_tokens=3), [], NUM_IDS, end_token_ids=[7])
    assert [sampler.is_plain_greedy(index) for index in range(5)] == [False] * 3 + [True] * 2
    assert TokenSampler(SamplingParams(min_tokens=3), [], NUM_IDS).is_plain_greedy(0)


def test_the_noise_of_many_rows_is_used_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    params, logits = SamplingParams(temperature=1.0, seed=3), logits_of(9, 0)
    draft = (1,) * 8
    usual = sample(TokenSampler(params, (), NUM_IDS), logits, (), draft)
    monkeypatch.setattr(sampler_module, "_NOISE_ELEMENTS", 1)
    monkeypatch.setattr(sampler_module, "_KEPT_ELEMENTS", 2 * NUM_IDS)
    sampler = TokenSampler(params, (), NUM_IDS)
    assert sample(sampler, logits[:2], (), (1,)) == usual[:2]
    assert sample(sampler, logits, (), draft) == usual
    assert sampler._noise is not None and sampler._noise.shape == (2, NUM_IDS)


def _request(
    params: SamplingParams, num_rows: int, num_top: int | None, device: str = "cpu"
) -> SampleRequest:
    sampler = TokenSampler(params, [1], NUM_IDS, device, end_token_ids=[2])
    return SampleRequest(sampler, [3], [4] * (num_rows - 1), num_top)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.tuples(PARAMS, st.integers(1, 4), st.sampled_from([None, 0, 1, 5, 20, 40])),
        min_size=1,
        max_size=4,
    )
)
def test_they_are_of_the_logits_as_they_came_and_change_no_token(
    parts: list[tuple[SamplingParams, int, int | None]],
) -> None:
    num_rows = [rows for _, rows, _ in parts]
    logits = logits_of(sum(num_rows), 7)
    plain = sample_step([_request(params, rows, None) for params, rows, _ in parts], logits)
    told = sample_step([_request(*part) for part in parts], logits)
    ids, logprobs = zip(*told, strict=True)
    assert list(ids) == [token_ids for token_ids, _ in plain]
    expected = torch.split(logits.log_softmax(-1), num_rows)
    for rows, chosen, found, (_, _, wanted) in zip(expected, ids, logprobs, parts, strict=True):
        if wanted is None:
            assert found == []
            continue
        for row, token_id, one in zip(rows, chosen, found, strict=True):
            assert one.logprob == pytest.approx(float(row[token_id]), abs=1e-5)
            values, order = row.sort(descending=True)
            count = min(wanted, NUM_IDS)
            assert [token_id for token_id, _ in one.top] == order[:count].tolist()
            assert [value for _, value in one.top] == pytest.approx(
                values[:count].tolist(), abs=1e-5
            )


def test_every_device_measures_the_same(device: str) -> None:
    params = SamplingParams(temperature=0.8, seed=4), SamplingParams(min_tokens=9)
    here, there = (
        sample_step(
            [_request(params[0], 4, 5, where), _request(params[1], 4, 0, where)],
            logits_of(8, 3, where),
        )
        for where in ("cpu", device)
    )
    (ids, expected), (ids_there, found) = zip(*here, strict=True), zip(*there, strict=True)
    assert ids_there == ids
    for there, here in zip(chain(*found), chain(*expected), strict=True):
        assert there.logprob == pytest.approx(here.logprob, abs=1e-5)
        assert [token_id for token_id, _ in there.top] == [token_id for token_id, _ in here.top]


@contextmanager
def counted_transfers() -> Iterator[list[str]]:
    """Gives the calls of a tensor's methods that copy values to the host and wait for them."""
    calls: list[str] = []

    def noting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def note(*args: object) -> object:
            calls.append(name)
            return original(*args)

        return mock.patch.object(torch.Tensor, name, note)

    with ExitStack() as stack:
        for name in ("tolist", "item", "cpu", "__bool__", "__int__"):
            stack.enter_context(noting(name))
        yield calls


def test_tokens_and_log_probabilities_come_with_one_copy_from_the_device() -> None:
    sampled = SamplingParams(temperature=1.0, top_k=4, top_p=0.9, min_p=0.1)
    requests = [
        _request(SamplingParams(), 2, 4),
        _request(sampled, 3, None),
        _request(SamplingParams(frequency_penalty=0.5), 2, None),
    ]
    with counted_transfers() as transfers:
        sample_step(requests, logits_of(7, 0))
    assert len(transfers) == 1


def test_a_certain_token_is_never_above_certainty_and_an_excluded_one_is_minus_infinity() -> None:
    logits = torch.full((1, NUM_IDS), float("-inf"))
    logits[0, 5] = 12345.678
    [(_, [found])] = sample_step([_request(SamplingParams(), 1, 2)], logits)
    assert found.logprob == 0.0
    assert found.top[0] == (5, 0.0) and found.top[1][1] == float("-inf")


def test_a_row_without_usable_logits_has_no_log_probabilities() -> None:
    logits = logits_of(2, 0)
    logits[1, 3] = float("nan")
    with pytest.raises(HippoError, match="not usable"):
        sample_step([_request(SamplingParams(), 2, 3)], logits)
