"""Text from token ids, piece by piece, and stop strings in it."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.answer.text import Detokenizer, StopStrings
from gateway.pairs.token_bytes import TokenBytes
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
SIZES = st.lists(st.integers(1, 16), min_size=1)  # of the verdicts, over and over


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Letters of several tokens, and between them any token at all."""
    letters = st.sampled_from([tokenizer.encode(letter).ids for letter in LETTERS])
    any_token = st.integers(0, tokenizer.get_vocab_size() - 1).map(lambda token_id: [token_id])
    few = st.lists(st.one_of(letters, letters, letters, any_token), max_size=60)
    return few.map(lambda parts: [token_id for part in parts for token_id in part])


CASES = st.sampled_from(sorted(VOCABULARIES)).flatmap(
    lambda name: st.tuples(st.just(name), ids_of(VOCABULARIES[name]))
)


def verdicts_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """The ids in blocks of these sizes."""
    blocks: list[list[int]] = []
    start = 0
    for size in cycle(sizes):
        if start >= len(ids):
            return blocks
        blocks.append(ids[start : start + size])
        start += size
    raise AssertionError("there are no sizes")


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
