"""From verdicts to an answer's text, whatever blocks the tokens came in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from gateway.text import LEAST_LOGPROB, AnswerText, Piece, TokenTexts, join_pieces
from hippo.errors import IncompatiblePairError
from hippo.types import FinishReason, TokenLogprobs, Verdict
from tests.unit.gateway.test_detokenizer import SPECIAL_ID, TOKENIZER


def _read(answer: AnswerText, ids: list[int], sizes: list[int], last: FinishReason) -> Piece:
    """Feeds the ids in blocks until the answer has ended; id i has log-probability -i."""
    pieces, start = [], 0
    for size in [*sizes, len(ids)]:
        block = tuple(ids[start : start + size])
        start += size
        reason = last if start >= len(ids) else None
        if block and answer.finish_reason is None:
            logprobs = tuple(TokenLogprobs(-float(token_id)) for token_id in block)
            verdict = Verdict(0, 0, block, finish_reason=reason, logprobs=logprobs)
            pieces.append(answer.add_verdict(verdict))
    return join_pieces(pieces)


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
        text = _read(answer, ids, cut, FinishReason.LENGTH).text
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
    assert _read(answer, ids, [2], FinishReason.LENGTH) == Piece(expected)
    assert (answer.num_tokens, answer.finish_reason) == (num_tokens, FinishReason.STOP)


def test_an_end_token_counts_but_is_no_text() -> None:
    ids = TOKENIZER.encode("ab").ids
    answer = AnswerText(TOKENIZER, stops=())
    assert _read(answer, ids, [], FinishReason.STOP) == Piece("a")
    assert (answer.num_tokens, answer.finish_reason) == (2, FinishReason.STOP)


@given(
    words=st.text(alphabet="ab€", min_size=1, max_size=12),
    stop=st.text(alphabet="ab€", min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), max_size=12),
)
def test_log_probabilities_are_those_of_the_tokens_that_begin_in_the_text(
    words: str, stop: str, sizes: list[int]
) -> None:
    ids = TOKENIZER.encode(words).ids
    answer = AnswerText(TOKENIZER, stops=[stop], has_logprobs=True)
    whole = _read(answer, ids, sizes, FinishReason.LENGTH)
    # A token is a byte here, and a character of several bytes begins with its first.
    data = bytes(byte for entry in whole.logprobs for byte in entry["bytes"])
    assert data.decode() == whole.text == words.split(stop)[0]
    listed = ids[: len(whole.logprobs)]
    assert [entry["logprob"] for entry in whole.logprobs] == [-float(one) for one in listed]


def test_each_log_probability_comes_with_the_text_that_its_token_begins_in() -> None:
    ids = TOKENIZER.encode("a€bc").ids
    answer = AnswerText(TOKENIZER, stops=["bx"], has_logprobs=True)
    counts = []
    for place, token_id in enumerate(ids):
        reason = FinishReason.LENGTH if place == len(ids) - 1 else None
        verdict = Verdict(
            0, place, (token_id,), finish_reason=reason, logprobs=(TokenLogprobs(-1.0),)
        )
        piece = answer.add_verdict(verdict)
        counts.append((piece.text, len(piece.logprobs)))
    assert counts == [("a", 1), ("", 0), ("", 0), ("€", 3), ("", 0), ("bc", 2)]


def test_an_end_token_has_no_log_probability_but_a_skipped_one_has() -> None:
    ids = [*TOKENIZER.encode("a").ids, SPECIAL_ID, SPECIAL_ID]
    answer = AnswerText(TOKENIZER, stops=(), has_logprobs=True)
    piece = _read(answer, ids, [], FinishReason.STOP)
    assert (piece.text, answer.num_tokens) == ("a", 3)
    assert [entry["token"] for entry in piece.logprobs] == ["a", "<|im_end|>"]


def test_a_target_that_tells_no_log_probabilities_is_named() -> None:
    answer = AnswerText(TOKENIZER, stops=(), has_logprobs=True)
    with pytest.raises(IncompatiblePairError, match="older release"):
        answer.add_verdict(Verdict(0, 0, (1,)))


def test_tokens_are_described_by_their_bytes_even_within_a_character() -> None:
    texts = TokenTexts(TOKENIZER)
    for text in ("a", " ", "€", "\n", "\x7f", "é"):
        ids = TOKENIZER.encode(text).ids
        assert b"".join(map(texts.bytes_of, ids)) == text.encode()
    first = TOKENIZER.encode("€").ids[0]
    assert texts.describe_token(first, -0.5) == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xE2],
    }
    assert texts.describe_token(SPECIAL_ID, float("-inf")) == {
        "token": "<|im_end|>",
        "logprob": LEAST_LOGPROB,
        "bytes": list(b"<|im_end|>"),
    }


def test_tokens_of_a_vocabulary_of_words_are_described_by_their_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    entry = TokenTexts(tokenizer).entry(0, TokenLogprobs(-0.5, ((0, -0.5), (1, -2.0))))
    assert entry["token"] == "one" and entry["bytes"] == list(b"one")
    assert [top["token"] for top in entry["top_logprobs"]] == ["one", "two"]
