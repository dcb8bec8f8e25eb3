"""Guesses from what was said before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.speculation.continuations import Continuations


def test_what_followed_the_same_words_is_guessed() -> None:
    continuations = Continuations([1, 2, 3, 4, 5])
    assert continuations.after([9, 2, 3], 2) == (4, 5)
    assert continuations.after([9, 2, 3, 4], 8) == (5, 9, 2, 3, 4)


def test_the_longest_match_wins_and_of_equal_ones_the_last() -> None:
    continuations = Continuations([1, 2, 7, 5, 2, 8, 5, 2, 9])
    assert continuations.after([1, 2], 1) == (7,)
    assert continuations.after([1, 2, 5, 2], 1) == (9,)


def test_nothing_is_guessed_where_nothing_was_said_before() -> None:
    continuations = Continuations()
    assert continuations.after([], 4) == ()
    assert continuations.after([5], 4) == ()
    assert continuations.after([5, 6, 5], 0) == ()
    assert continuations.after([5, 6, 5], 4) == (6, 5)


def test_what_was_rolled_back_is_forgotten() -> None:
    continuations = Continuations([1, 2])
    assert continuations.after([3, 4, 3], 1) == (4,)
    continuations.roll_back(1)
    assert continuations.after([3, 5, 3], 1) == (5,)
    continuations.roll_back(0)
    assert continuations.after([3], 1) == ()


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=12),
    runs=st.lists(
        st.tuples(st.integers(0, 8), st.lists(st.integers(0, 3), max_size=6)), max_size=8
    ),
    most=st.integers(1, 5),
)
def test_a_guess_always_stands_behind_the_same_token_in_the_text(
    prompt: list[int], runs: list[tuple[int, list[int]]], most: int
) -> None:
    continuations = Continuations(prompt)
    output: list[int] = []
    for keep, added in runs:
        continuations.roll_back(keep)
        output = output[:keep] + added
        text = prompt + output
        guess = continuations.after(output, most)
        assert len(guess) <= most
        if guess:
            found = (text[-1], *guess)
            places = range(len(text) - len(found) + 1)
            assert any(tuple(text[place : place + len(found)]) == found for place in places)
