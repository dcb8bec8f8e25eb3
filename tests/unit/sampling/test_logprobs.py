"""Log-probabilities of chosen tokens: what they are of, what they cost, whom they concern."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.errors import HippoError
from hippo.sampling import SampleRequest, TokenSampler, sample_step, sample_with_logprobs
from hippo.types import SamplingParams
from tests.support.transfers import counted_transfers
from tests.unit.sampling.test_sampler import NUM_IDS, PARAMS, logits_of


def _requests(params: list[SamplingParams], num_rows: list[int]) -> list[SampleRequest]:
    return [
        SampleRequest(TokenSampler(each, [1], NUM_IDS, end_token_ids=[2]), 1, [3], [4] * (rows - 1))
        for each, rows in zip(params, num_rows, strict=True)
    ]


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
    params = [each for each, _, _ in parts]
    num_rows = [rows for _, rows, _ in parts]
    logits = logits_of(sum(num_rows), 7)
    plain = sample_step(_requests(params, num_rows), logits, num_rows=num_rows)
    ids, logprobs = sample_with_logprobs(
        _requests(params, num_rows),
        logits,
        num_rows=num_rows,
        num_top=[wanted for _, _, wanted in parts],
    )
    assert ids == plain
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
    params = [SamplingParams(temperature=0.8, seed=4), SamplingParams(min_tokens=9)]
    num_rows, num_top = [4, 3], [5, 0]
    (ids, expected), (ids_there, found) = (
        sample_with_logprobs(
            [
                SampleRequest(
                    TokenSampler(each, [1], NUM_IDS, where, end_token_ids=[2]), 1, [3], [4] * 3
                )
                for each in params
            ],
            logits_of(7, 3, where),
            num_rows=num_rows,
            num_top=num_top,
        )
        for where in ("cpu", device)
    )
    assert ids_there == ids
    for there, here in zip(chain(*found), chain(*expected), strict=True):
        assert there.logprob == pytest.approx(here.logprob, abs=1e-5)
        assert [token_id for token_id, _ in there.top] == [token_id for token_id, _ in here.top]


def test_they_come_with_the_one_copy_of_the_tokens() -> None:
    requests = _requests([SamplingParams(), SamplingParams(temperature=1.0)], [2, 3])
    with counted_transfers() as transfers:
        sample_with_logprobs(requests, logits_of(5, 0), num_rows=[2, 3], num_top=[4, None])
    assert transfers.num == 1


def test_a_certain_token_is_never_above_certainty_and_an_excluded_one_is_minus_infinity() -> None:
    logits = torch.full((1, NUM_IDS), float("-inf"))
    logits[0, 5] = 12345.678
    _, ((found,),) = sample_with_logprobs(
        _requests([SamplingParams()], [1]), logits, num_rows=[1], num_top=[2]
    )
    assert found.logprob == 0.0
    assert found.top[0] == (5, 0.0) and found.top[1][1] == float("-inf")


def test_a_row_without_usable_logits_is_an_error() -> None:
    logits = logits_of(2, 0)
    logits[1, 3] = float("nan")
    with pytest.raises(HippoError, match="not usable"):
        sample_with_logprobs(_requests([SamplingParams()], [2]), logits, num_rows=[2], num_top=[3])
