"""From token ids and verdicts to an answer's text, whatever blocks the tokens came in."""

from collections.abc import Iterator
from itertools import cycle, islice

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.answer.text import (
    LEAST_LOGPROB,
    AnswerText,
    Detokenizer,
    Piece,
    StopStrings,
    join_pieces,
)
from gateway.pairs.token_bytes import TokenBytes
from hippo.errors import IncompatiblePairError
from hippo.types import FinishReason, TokenLogprobs, Verdict
from tests.support.models.vocabularies import (
    LETTERS,
    SPECIAL,
    byte_tokenizer,
    crossing_tokenizer,
    sentencepiece_tokenizer,
    word_tokenizer,
)

TOKENIZER = byte_tokenizer()
TOKENS = TokenBytes(TOKENIZER)
SPECIAL_ID = 256
VOCABULARIES = {
    "bytes": TOKENIZER,
    "crossing": crossing_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(),
    "words": word_tokenizer(),
}
SIZES = st.lists(st.integers(1, 16), min_size=1)  # of the verdicts


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Letters of several tokens, and between them any token at all."""
    letters = st.sampled_from([tokenizer.encode(letter).ids for letter in LETTERS])
    any_token = st.integers(0, tokenizer.get_vocab_size() - 1).map(lambda token_id: [token_id])
    few = st.lists(st.one_of(letters, letters, letters, any_token), max_size=60)
    return few.map(lambda parts: [token_id for part in parts for token_id in part])


CASES = st.sampled_from(sorted(VOCABULARIES)).flatmap(
    lambda name: st.tuples(st.just(name), ids_of(VOCABULARIES[name]))
)


def verdicts_of(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """The ids in blocks of these sizes, over and over."""
    rest, size = iter(ids), cycle(sizes)
    while block := list(islice(rest, next(size))):
        yield block


def read(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The pieces of text, joined."""
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    return "".join(map(detokenizer.add_token, ids)) + detokenizer.flush_text()


@given(case=CASES)
def test_the_pieces_join_to_the_text_of_all_ids(case: tuple[str, list[int]]) -> None:
    name, ids = case
    whole = VOCABULARIES[name].decode(ids, skip_special_tokens=True)
    # SentencePiece's decoder gives up a whole row of bytes for one that is wrong.
    assume(name != "sentencepiece" or "\ufffd" not in whole)
    assert read(VOCABULARIES[name], ids) == whole


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_tokens_bytes_join_to_the_text_and_a_special_token_is_none_of_it(name: str) -> None:
    tokenizer = VOCABULARIES[name]
    tokens = TokenBytes(tokenizer)
    ids = tokenizer.encode("a the é 🎈 one").ids
    first, *others = ids
    data = tokens.of_token(first, is_first=True) + b"".join(map(tokens.of_token, others))
    assert data.decode() == tokenizer.decode(ids)
    (special_id,) = tokens.special_ids
    assert tokens.of_token(special_id) == SPECIAL.encode()
    assert read(tokenizer, [first, special_id, *others]) == tokenizer.decode(ids)


def test_a_token_that_no_vocabulary_has_is_no_text() -> None:
    for tokenizer in VOCABULARIES.values():
        assert read(tokenizer, [1, 100_000, 1]) == tokenizer.decode([1, 1])


@pytest.mark.parametrize("name", VOCABULARIES)
def test_an_added_token_that_is_not_special_has_the_tokenizers_text(name: str) -> None:
    tokenizer = Tokenizer.from_str(VOCABULARIES[name].to_str())
    tokenizer.add_tokens(["<tool>"])
    tool_id = tokenizer.get_vocab_size() - 1
    for before in ("a", "the"):
        ids = [*tokenizer.encode(before).ids, tool_id, tool_id]
        assert read(tokenizer, ids) == tokenizer.decode(ids)


def test_a_name_of_other_letters_than_bytes_have_is_text() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<｜tool｜>"])
    ids = [token_id for text in ("a", "<｜tool｜>", "é") for token_id in tokenizer.encode(text).ids]
    assert read(tokenizer, ids) == tokenizer.decode(ids) == "a<｜tool｜>é"


def test_a_broken_byte_comes_out_with_the_next_token() -> None:
    broken, whole = TOKENIZER.encode("€").ids[0], TOKENIZER.encode("a").ids[0]
    detokenizer = Detokenizer(TOKENS)
    pieces = map(detokenizer.add_token, (broken, broken, whole, broken))
    assert [*pieces, detokenizer.flush_text()] == ["", "\ufffd", "\ufffda", "", "\ufffd"]


@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5)),
)
def test_a_stop_string_is_found_across_any_borders(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    cutter = StopStrings(stops)
    out, rest = "", text
    for size in [*cuts, len(text) or 1]:
        out += cutter.add_piece(rest[:size])
        rest = rest[size:]
    if cutter.matched is None:
        out += cutter.flush_text()
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert out == (text[: min(matches)[1]] if matches else text)


@pytest.mark.parametrize(
    ("early", "late", "stops", "expected"),
    [
        ("abXab", "cXd", ["X"], "abXabc"),
        ("ab", "cd", ["bc"], "a"),  # begins early, is complete late
        ("aX", "bXYc", ["X", "XY"], "aXb"),
        ("a", "ab", ["aa"], ""),
        ("aa", "ab", ["aa"], "a"),
        ("ab", "x", ["b", "abc"], "abx"),  # what is held back holds one that was too early
    ],
)
def test_a_stop_string_that_is_complete_too_early_does_not_count(
    early: str, late: str, stops: list[str], expected: str
) -> None:
    for size in (1, len(early)):
        cutter = StopStrings(stops)
        text = "".join(
            cutter.add_piece(early[start : start + size], can_match=False)
            for start in range(0, len(early), size)
        )
        text += cutter.add_piece(late)
        text += "" if cutter.matched is not None else cutter.flush_text()
        assert text == expected


def _pieces(
    answer: AnswerText, ids: list[int], sizes: list[int], last: FinishReason
) -> Iterator[Piece]:
    """Feeds the ids in blocks until the answer has ended; id i has log-probability -i."""
    num_told = 0
    for block in verdicts_of(ids, sizes):
        num_told += len(block)
        if answer.finish_reason is None:
            reason = last if num_told == len(ids) else None
            logprobs = tuple(TokenLogprobs(-float(token_id)) for token_id in block)
            verdict = Verdict(0, 0, tuple(block), finish_reason=reason, logprobs=logprobs)
            yield answer.add_verdict(verdict)


def _read(answer: AnswerText, ids: list[int], sizes: list[int], last: FinishReason) -> Piece:
    return join_pieces(list(_pieces(answer, ids, sizes, last)))


@given(
    case=CASES,
    sizes=SIZES,
    stops=st.lists(st.sampled_from([*LETTERS, "\ufffd", "🚀e"]), max_size=2),
    min_tokens=st.sampled_from([0, 0, 20]),
    has_logprobs=st.booleans(),
    last=st.sampled_from(FinishReason),
)
@example(("bytes", TOKENIZER.encode("a" + "🎈" * 20).ids), [12], [], 0, False, FinishReason.LENGTH)
def test_all_that_an_answer_has_is_that_of_a_target_that_says_one_token_at_a_time(
    case: tuple[str, list[int]],
    sizes: list[int],
    stops: list[str],
    min_tokens: int,
    has_logprobs: bool,
    last: FinishReason,
) -> None:
    name, ids = case
    found = []
    for cut in (sizes, [1]):
        answer = AnswerText(
            TokenBytes(VOCABULARIES[name]),
            stops=stops,
            min_tokens=min_tokens,
            has_logprobs=has_logprobs,
        )
        found.append((_read(answer, ids, cut, last), answer.num_tokens, answer.finish_reason))
    assert found[0] == found[1]


@given(case=CASES, sizes=SIZES)
def test_the_bytes_of_log_probabilities_join_to_the_text(
    case: tuple[str, list[int]], sizes: list[int]
) -> None:
    name, ids = case
    tokens = TokenBytes(VOCABULARIES[name])
    answer = AnswerText(tokens, stops=(), has_logprobs=True)
    whole = _read(answer, ids, sizes, FinishReason.LENGTH)
    told = zip(ids, (bytes(entry["bytes"]) for entry in whole.logprobs), strict=True)
    data = b"".join(part for token_id, part in told if token_id not in tokens.special_ids)
    assert data.decode(errors="replace") == whole.text


@pytest.mark.parametrize(
    ("min_tokens", "expected", "num_tokens"), [(0, "a", 2), (1, "a", 2), (2, "abca", 5)]
)
def test_a_stop_string_counts_from_its_first_completion_after_min_tokens(
    min_tokens: int, expected: str, num_tokens: int
) -> None:
    ids = TOKENIZER.encode("abcab").ids
    answer = AnswerText(TOKENS, stops=["b"], min_tokens=min_tokens)
    assert _read(answer, ids, [2, 9], FinishReason.LENGTH) == Piece(expected)
    assert (answer.num_tokens, answer.finish_reason) == (num_tokens, FinishReason.STOP)


@given(
    words=st.text(alphabet="ab€", min_size=1, max_size=12),
    stop=st.text(alphabet="ab€", min_size=1, max_size=3),
    sizes=SIZES,
)
def test_log_probabilities_are_those_of_the_tokens_that_begin_in_the_text(
    words: str, stop: str, sizes: list[int]
) -> None:
    ids = TOKENIZER.encode(words).ids
    answer = AnswerText(TOKENS, stops=[stop], has_logprobs=True)
    whole = _read(answer, ids, sizes, FinishReason.LENGTH)
    # A token is a byte here, and a character of several bytes begins with its first.
    data = bytes(byte for entry in whole.logprobs for byte in entry["bytes"])
    assert data.decode() == whole.text == words.split(stop)[0]
    listed = ids[: len(whole.logprobs)]
    assert [entry["logprob"] for entry in whole.logprobs] == [-float(one) for one in listed]


def test_each_log_probability_comes_with_the_text_that_its_token_begins_in() -> None:
    answer = AnswerText(TOKENS, stops=["bx"], has_logprobs=True)
    pieces = _pieces(answer, TOKENIZER.encode("a€bc").ids, [1], FinishReason.LENGTH)
    counts = [(piece.text, len(piece.logprobs)) for piece in pieces]
    assert counts == [("a", 1), ("", 0), ("", 0), ("€", 3), ("", 0), ("bc", 2)]


def test_an_end_token_has_no_log_probability_but_a_skipped_one_has() -> None:
    for end_id in (SPECIAL_ID, *TOKENIZER.encode("b").ids):
        ids = [*TOKENIZER.encode("a").ids, SPECIAL_ID, end_id]
        answer = AnswerText(TOKENS, stops=(), has_logprobs=True)
        piece = _read(answer, ids, [9], FinishReason.STOP)
        assert (piece.text, answer.num_tokens) == ("a", 3)
        assert answer.finish_reason is FinishReason.STOP
        assert [entry["token"] for entry in piece.logprobs] == ["a", "<|im_end|>"]


def test_a_target_that_tells_no_log_probabilities_is_named() -> None:
    answer = AnswerText(TOKENS, stops=(), has_logprobs=True)
    with pytest.raises(IncompatiblePairError, match="older release"):
        answer.add_verdict(Verdict(0, 0, (1,)))


def test_tokens_are_described_by_their_bytes_even_within_a_character() -> None:
    first = TOKENIZER.encode("€").ids[0]
    logprobs = TokenLogprobs(-0.5, ((first, -0.5), (SPECIAL_ID, float("-inf"))))
    last = Verdict(0, 0, (first,), finish_reason=FinishReason.LENGTH, logprobs=(logprobs,))
    (entry,) = AnswerText(TOKENS, stops=(), has_logprobs=True).add_verdict(last).logprobs
    part = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xE2]}
    name = "<|im_end|>"
    special = {"token": name, "logprob": LEAST_LOGPROB, "bytes": list(name.encode())}
    assert entry == {**part, "top_logprobs": [part, special]}
