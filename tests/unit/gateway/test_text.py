"""From verdicts to an answer's text, whatever blocks the tokens came in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text import AnswerText
from hippo.types import FinishReason, Verdict
from tests.unit.gateway.test_detokenizer import TOKENIZER


def _read(answer: AnswerText, ids: list[int], sizes: list[int], last: FinishReason) -> str:
    """Feeds the ids in blocks until the answer has ended."""
    text, start = "", 0
    for size in [*sizes, len(ids)]:
        block = tuple(ids[start : start + size])
        start += size
        reason = last if start >= len(ids) else None
        if block and answer.finish_reason is None:
            text += answer.add(Verdict(0, start - size, block, finish_reason=reason))
    return text


@given(
    words=st.text(alphabet="ab€", min_size=1, max_size=12),
    stop=st.text(alphabet="ab€", min_size=1, max_size=2),
    min_tokens=st.integers(0, 14),
    sizes=st.lists(st.integers(1, 5), max_size=12),
)
def test_text_count_and_reason_do_not_depend_on_the_blocks(
    words: str, stop: str, min_tokens: int, sizes: list[int]
) -> None:
    ids = TOKENIZER.encode(words).ids
    found = []
    for cut in (sizes, [1] * len(ids)):
        answer = AnswerText(TOKENIZER, stops=[stop], min_tokens=min_tokens)
        text = _read(answer, ids, cut, FinishReason.LENGTH)
        found.append((text, answer.num_tokens, answer.finish_reason))
    assert found[0] == found[1]
    text, num_tokens, reason = found[0]
    assert (reason is FinishReason.STOP) == (text != words)
    assert reason is FinishReason.LENGTH or num_tokens > min_tokens


@pytest.mark.parametrize(
    ("min_tokens", "expected", "num_tokens"), [(0, "a", 2), (1, "a", 2), (2, "abca", 5)]
)
def test_a_stop_string_counts_from_its_first_completion_after_min_tokens(
    min_tokens: int, expected: str, num_tokens: int
) -> None:
    ids = TOKENIZER.encode("abcab").ids
    answer = AnswerText(TOKENIZER, stops=["b"], min_tokens=min_tokens)
    assert _read(answer, ids, [2], FinishReason.LENGTH) == expected
    assert (answer.num_tokens, answer.finish_reason) == (num_tokens, FinishReason.STOP)


def test_an_end_token_counts_but_is_no_text() -> None:
    ids = TOKENIZER.encode("ab").ids
    answer = AnswerText(TOKENIZER, stops=())
    assert _read(answer, ids, [], FinishReason.STOP) == "a"
    assert (answer.num_tokens, answer.finish_reason) == (2, FinishReason.STOP)
