"""Log-probabilities of chosen tokens: what they are of, what they cost, whom they concern."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.sampling.sampler import SampleRequest, TokenSampler, sample_step
from hippo.types import SamplingParams
from tests.support.devices.transfers import counted_transfers
from tests.unit.sampling.test_sampler import NUM_IDS, PARAMS, logits_of


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
