"""Which option an answer chooses, in the many ways in which models say it."""

from __future__ import annotations

import pytest

from hippo.lab.benchmark.choices import choice_in

COLOURS = ("red", "dark blue", "blue", "green")
NUMBERS = ("5", "-5", "5.5", "50")
SENTENCES = ("A man walks a dog", "A man runs", "A woman walks a dog", "None of the above")


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        # a letter, alone or with its text
        ("b", "B"), ("(b)", "B"), ("[B]", "B"), ("**B**", "B"), ("`B`", "B"), ("$B$", "B"),
        ("b. dark blue", "B"), ("**B. dark blue**", "B"), ("B: it is dark.", "B"),
        ("B\n\nThe car that passes the house in the first part of the video is dark.", "B"),
        # after a phrase
        ("The answer is (B).", "B"), ("**Answer:** B", "B"), ("answer is b.", "B"),
        ("The correct option is **(B)**.", "B"), ("答案是B。", "B"), ("答案：B", "B"),
        ("The answer would be B because it is dark.", "B"),
        ("The answer to the question is dark blue.", "B"),
        # marked
        ("<think>A or C?</think><answer> b </answer>", "B"), ("<answer>B", "B"),
        ("It is A.\n<answer>B. dark blue</answer>", "B"), (r"\boxed{B}", "B"),
        (r"So $\boxed{\text{B}}$.", "B"), ("<think>The answer is A.</think>B", "B"),
        # in sentences
        ("Option B is correct.", "B"), ("I would say that it is most likely to be B.", "B"),
        ("Based on the video, the colour is option (B), as the car shows in the light.", "B"),
        # several, of which the last or the one that is not denied counts
        ("The answer is A. Wait, no. The answer is B.", "B"), ("It is not A but B", "B"),
        ("The answer is B because the car that passes the house is dark and shiny", "B"),
        ("Option B describes the video best.", "B"), ("Option A describes the video best.", "A"),
        ("The answer is **not** B, it is C.", "C"), ("<think>The answer is A? Let me", None),
        ("The answer is A or B the answer is A or B " * 200, None),
        ("Option A is incorrect, so B", None),
        # by its text
        ("Dark  Blue", "B"), ("It is dark blue", "B"), ("blue", "C"), ("It is not red.", None),
        # none
        ("A and B are both right", None), ("The answer is A or B.", None), ("A man", None),
        ("Answer: E", None), ("", None), ("red or green", None), ("B/C", None),
        ("It has vitamin C in it, which is good for the people", None),
        ("A. red\nB. dark blue\nC. blue\nD. green", None), ("The answer is not B.", None),
    ],
)  # fmt: skip
def test_of_colours(text: str, chosen: str | None) -> None:
    assert choice_in(text, COLOURS) == chosen


@pytest.mark.parametrize(
    ("options", "text", "chosen"),
    [
        (NUMBERS, "-5", "B"), (NUMBERS, "about 5.5 m", "C"), (NUMBERS, "50%", None),
        (("C", "C++"), "C", "A"), (("C", "C++"), "It is in C++.", "B"),
        (("C", "C++", "Java"), "C", "C"),
        (SENTENCES, "A man runs.", "B"), (SENTENCES, "A woman", None),
        (SENTENCES, "The answer is A because a man walks.", "A"),
        (("+", "-"), " - ", "B"), (("yes", "no"), "Yes.", "A"), (("Plan B", "Plan A"), "B", "B"),
        (("same", "same"), "same", None), (("红色", "绿色"), "是红色的", "A"),
        (tuple("123456789"), "I think that it is 3.", "C"),
    ],
)  # fmt: skip
def test_of_other_options(options: tuple[str, ...], text: str, chosen: str | None) -> None:
    assert choice_in(text, options) == chosen
