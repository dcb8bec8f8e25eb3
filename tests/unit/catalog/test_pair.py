"""Which drafts and targets may work together."""

import dataclasses

import pytest

from hippo.catalog.pair import check_pair
from hippo.errors import IncompatiblePairError
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
    video_hash=b"c" * 32,
)


def test_models_with_one_tokenizer_fit() -> None:
    draft = dataclasses.replace(TARGET, name="draft", num_parameters=10)
    check_pair(draft, TARGET)
    check_pair(dataclasses.replace(draft, video_hash=b""), TARGET)  # of an earlier release


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer_hash": b"b" * 32}, "different tokenizers"),
        ({"protocol_version": 99}, "protocol version 99"),
        ({"num_token_ids": 269}, "269 token ids"),
        ({"video_hash": b"d" * 32}, "different prompts of a video"),
    ],
)
def test_models_that_differ_where_it_matters_are_refused(
    change: dict[str, object], said: str
) -> None:
    draft = dataclasses.replace(TARGET, name="draft", **change)  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePairError, match=said):
        check_pair(draft, TARGET)


@pytest.mark.parametrize("change", [{"tokenizer_hash": b"b"}, {"video_hash": b"d"}])
@pytest.mark.parametrize(
    ("family", "num_parameters", "advice"),
    [
        (
            "qwen3_vl",
            8_767_123_696,
            r"\(qwen3_vl\): Qwen/Qwen3-VL-2B-Instruct, Qwen/Qwen3-VL-4B-Instruct$",
        ),
        ("qwen3_vl_moe", 31_070_754_032, r"Qwen3-VL-8B-Instruct$"),
        ("qwen2_vl", 1000, r"choose a smaller model of the target's family \(qwen2_vl\)$"),
    ],
)
def test_a_refusal_names_the_published_drafts_of_the_targets_family(
    family: str, num_parameters: int, advice: str, change: dict[str, bytes]
) -> None:
    target = dataclasses.replace(TARGET, family=family, num_parameters=num_parameters)
    draft = dataclasses.replace(target, name="draft", **change)  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePairError, match=advice):
        check_pair(draft, target)
