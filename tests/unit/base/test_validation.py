"""Ranges of request values: what is refused, and how it is said."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hippo.base.validation import validate_sampling
from hippo.errors import InvalidRequestError
from hippo.types import SamplingParams


def test_the_defaults_and_the_ends_of_every_range_are_accepted() -> None:
    validate_sampling(SamplingParams(), num_token_ids=10)
    validate_sampling(
        SamplingParams(
            temperature=2.0,
            top_k=2**31 - 1,
            top_p=1e-9,
            min_p=1.0,
            repetition_penalty=10.0,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((0, 100.0), (9, -100.0)),
            seed=2**64 - 1,
            choice_index=2**32 - 1,
        ),
        num_token_ids=10,
    )


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("temperature", -0.1, "0 to 2"),
        ("temperature", 2.1, "0 to 2"),
        ("temperature", math.nan, "0 to 2"),
        ("temperature", math.inf, "0 to 2"),
        ("temperature", "hot", "0 to 2"),
        ("temperature", True, "0 to 2"),
        ("top_k", -1, "a whole number from 0"),
        ("top_k", 2.5, "a whole number from 0"),
        ("top_p", 0.0, "greater than 0 and at most 1"),
        ("top_p", 1.01, "greater than 0 and at most 1"),
        ("top_p", math.nan, "greater than 0 and at most 1"),
        ("min_p", -0.01, "0 to 1"),
        ("min_p", 1.5, "0 to 1"),
        ("repetition_penalty", 0.0, "greater than 0 and at most 10"),
        ("repetition_penalty", 1e9, "greater than 0 and at most 10"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("frequency_penalty", -2.5, "-2 to 2"),
        ("seed", -1, "a whole number from 0"),
        ("seed", 2**64, "a whole number from 0"),
        ("choice_index", -1, "a whole number from 0"),
        ("logit_bias", ((3, 101.0),), "-100 to 100"),
        ("logit_bias", ((3, math.nan),), "-100 to 100"),
        ("logit_bias", ((10, 1.0),), "0 to 9"),
        ("logit_bias", ((-1, 1.0),), "0 to 9"),
        ("logit_bias", ((1.5, 1.0),), "whole numbers"),
        ("logit_bias", ((3, 1.0), (3, 1.0)), "twice"),
        ("logit_bias", tuple((i, 1.0) for i in range(1025)), "at most 1024"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_field_and_the_legal_range(
    field: str, value: Any, legal: str
) -> None:
    params = SamplingParams(**{field: value})
    with pytest.raises(InvalidRequestError) as caught:
        validate_sampling(params, num_token_ids=10)
    assert caught.value.param == field
    assert field in caught.value.message
    assert legal in caught.value.message
