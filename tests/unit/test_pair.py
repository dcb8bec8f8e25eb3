"""Which drafts and targets may work together."""

from __future__ import annotations

import dataclasses

import pytest

from hippo.errors import IncompatiblePairError
from hippo.pair import check_pair
from hippo.types import ModelInfo

TARGET = ModelInfo(
    name="target",
    family="qwen2_5_vl",
    device="cpu",
    dtype="float32",
    tokenizer_hash=b"a" * 32,
    tokenizer_json=b"{}",
    num_token_ids=268,
    end_token_ids=(262,),
    max_context_length=512,
    num_slots=1,
    num_parameters=1000,
)


def test_models_with_one_tokenizer_fit() -> None:
    check_pair(dataclasses.replace(TARGET, name="draft", num_parameters=10), TARGET)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer_hash": b"b" * 32}, "different tokenizers"),
        ({"protocol_version": 99}, "protocol version 99"),
        ({"num_token_ids": 269}, "269 token ids"),
    ],
)
def test_models_that_differ_where_it_matters_are_refused(
    change: dict[str, object], said: str
) -> None:
    draft = dataclasses.replace(TARGET, name="draft", **change)  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePairError, match=said):
        check_pair(draft, TARGET)
