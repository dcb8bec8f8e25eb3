"""Guesses from what was said before."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hippo.speculation.continuations import BrokenRun, Continuations


def test_what_followed_the_same_words_is_guessed() -> None:
    continuations = Continuations([1, 2, 3, 4, 5])
    assert continuations.guess_after([9, 2, 3], 2) == (4, 5)
    assert continuations.guess_after([9, 2, 3, 4], 8) == (5, 9, 2, 3, 4)


def test_the_longest_match_wins_and_of_equal_ones_the_last() -> None:
    continuations = Continuations([1, 2, 7, 5, 2, 8, 5, 2, 9])
    assert continuations.guess_after([1, 2], 1) == (7,)
    assert continuations.guess_after([1, 2, 5, 2], 1) == (9,)


def test_nothing_is_guessed_where_nothing_was_said_before() -> None:
    continuations = Continuations()
    assert continuations.guess_after([], 4) == ()
    assert continuations.guess_after([5], 4) == ()
    assert continuations.guess_after([5, 6, 5], 0) == ()
    assert continuations.guess_after([5, 6, 5], 4) == (6, 5)


def test_a_broken_run_goes_on_at_the_same_places_for_as_long_as_it_fits() -> None:
    run = BrokenRun([12, 13, 14, 15, 16], 2)
    assert run.guess_after([10, 51], 3) == (12, 13, 14)
    assert run.guess_after([10, 51, 12, 13], 8) == (14, 15, 16)
    assert run.guess_after([10, 51, 12, 77], 8) == ()
    assert run.guess_after([10, 51, 12, 77, 14], 8) == (15, 16)
    assert run.guess_after([10, 51, 12, 77, 14, 15, 16], 8) == ()
    assert run.guess_after([10, 51, 12, 77, 14, 15, 16, 17], 8) == ()


def test_a_broken_run_is_found_again_behind_a_word_more_or_less() -> None:
    more = BrokenRun([12, 13, 14, 15, 16], 2)
    assert more.guess_after([10, 51, 88, 12], 8) == ()
    assert more.guess_after([10, 51, 88, 12, 13], 8) == (14, 15, 16)
    assert more.guess_after([10, 51, 88, 12, 13, 14], 8) == (15, 16)
    less = BrokenRun([12, 13, 14, 15, 16], 2)
    assert less.guess_after([10, 51, 14], 8) == ()
    assert less.guess_after([10, 51, 14, 15], 8) == (16,)


def test_there_is_nothing_in_a_run_of_nothing() -> None:
    assert BrokenRun().guess_after([], 8) == ()
    assert BrokenRun().guess_after([10, 11, 12], 8) == ()
    assert BrokenRun([], 2).guess_after([10, 11], 8) == ()


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
        guess = continuations.guess_after(output, most)
        assert len(guess) <= most
        if guess:
            found = (text[-1], *guess)
            places = range(len(text) - len(found) + 1)
            assert any(tuple(text[place : place + len(found)]) == found for place in places)
