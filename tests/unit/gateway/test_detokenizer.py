"""Text from token ids, piece by piece, and stop strings in it."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.detokenizer import Detokenizer, StopStrings


def _bytes_tokenizer() -> Tokenizer:
    """One token a byte, and one special token after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return tokenizer


TOKENIZER = _bytes_tokenizer()
SPECIAL_ID = 256


def _cut(items: list[int], rng: random.Random) -> list[list[int]]:
    pieces = []
    while items:
        size = rng.randint(1, 7)
        pieces.append(items[:size])
        items = items[size:]
    return pieces


@given(text=st.text(max_size=40), seed=st.integers(0, 10**6))
def test_the_pieces_of_any_text_join_to_it(text: str, seed: int) -> None:
    assume("<|im_end|>" not in text)  # which is no text to the tokenizer
    ids = TOKENIZER.encode(text).ids
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add_tokens(piece) for piece in _cut(ids, random.Random(seed))]
    assert "".join(pieces) + detokenizer.flush_text() == text


@given(ids=st.lists(st.integers(0, SPECIAL_ID), max_size=40), seed=st.integers(0, 10**6))
def test_the_pieces_of_any_ids_join_to_their_whole_text(ids: list[int], seed: int) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add_tokens(piece) for piece in _cut(ids, random.Random(seed))]
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) + detokenizer.flush_text() == whole


def test_a_split_character_comes_out_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add_tokens([token_id]) for token_id in TOKENIZER.encode("a€b").ids]
    assert pieces == ["a", "", "", "€", "b"]


def test_special_tokens_are_left_out() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = [*TOKENIZER.encode("one").ids, SPECIAL_ID, *TOKENIZER.encode(" two").ids]
    assert detokenizer.add_tokens(ids) == "one two"


def test_endless_broken_bytes_are_given_out_in_time() -> None:
    broken = TOKENIZER.encode("€").ids[0]
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add_tokens([broken]) for _ in range(500)]
    num_out = sum(map(len, pieces))
    assert 400 < num_out <= 500


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


def test_nothing_that_begins_a_stop_string_is_given_out_early() -> None:
    cutter = StopStrings(["STOP"])
    assert [cutter.add_piece(piece) for piece in ("x S", "T", "O", "Y")] == ["x ", "", "", "STOY"]
