"""Which option an answer chooses, in the many ways in which models say it."""

import pytest

from hippo.lab.benchmark.choices import choice_in

COLOURS = ("red", "dark blue", "blue", "green")
NUMBERS = ("5", "-5", "5.5", "50")
LANGUAGES = ("C", "C++")
SENTENCES = ("A man walks a dog", "A man runs", "A woman walks a dog", "None of the above")


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        # a letter alone
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("(b)", "B"), ("[B]", "B"), ("B.", "B"), ("b)", "B"),
        ("**B**", "B"), ("`B`", "B"), (" B\n", "B"), ("> B", "B"), ('"B"', "B"), ("$B$", "B"),
        # with its text
        ("B) Dark blue", "B"), ("B. dark blue", "B"), ("(B) dark blue", "B"), ("b. dark blue", "B"),
        ("**B. dark blue**", "B"), ("B: it is dark.", "B"), ("B - dark blue", "B"),
        ("B\n\nThe car that passes the house in the first part of the video is dark.", "B"),
        # after a phrase
        ("The answer is (B).", "B"), ("The answer is B", "B"), ("Answer: B", "B"),
        ("Answer: **B**", "B"), ("**Answer:** B", "B"), ("**Answer: B**", "B"),
        ("Best option: B", "B"), ("The correct answer is: B) dark blue", "B"),
        ("The correct option is **(B)**.", "B"), ("Final answer: (b)", "B"), ("answer is b.", "B"),
        ("ANSWER = B", "B"), ("The answer would be B because it is dark.", "B"), ("答案是B。", "B"),
        ("答案：B", "B"), ("The answer to the question is dark blue.", "B"),
        # marked
        ("<answer>B</answer>", "B"), ("<think>A or C?</think><answer> b </answer>", "B"),
        ("It is A.\n<answer>B. dark blue</answer>", "B"), (r"\boxed{B}", "B"),
        (r"So $\boxed{\text{B}}$.", "B"), (r"The answer is \boxed{B}", "B"),
        ("<think>The answer is A.</think>B", "B"), ("<answer>B", "B"),
        # in sentences
        ("I choose B", "B"), ("Option B", "B"), ("Option B is correct.", "B"),
        ("B is the correct answer because the car that passes the house is dark.", "B"),
        ("I would say that it is most likely to be B.", "B"),
        ("Based on the video, the colour is option (B), as the car shows in the light.", "B"),
        # several, of which the last or the one that is not denied counts
        ("A. red is wrong. The answer is B.", "B"),
        ("The answer is A. Wait, no. The answer is B.", "B"),
        ("The answer is B, since the car near the red house is clearly dark in colour.", "B"),
        ("The answer is B because the car that passes the house is dark and shiny", "B"),
        ("B, because the blue car passes the house in the video", "B"),
        ("Option B describes the video best.", "B"), ("Option A describes the video best.", "A"),
        ("The answer is **not** B, it is C.", "C"), ("<think>The answer is A? Let me", None),
        ("The answer is A or B the answer is A or B " * 200, None),
        ("Option A is incorrect, so B", "B"), ("It is not A but B", "B"),
        ("A is not right; C is wrong; B is right.", "B"),
        # by its text
        ("dark blue.", "B"), ("Dark  Blue", "B"), ("It is dark blue", "B"), ("It is red.", "A"),
        ("The car is green, I think.", "D"), ("blue", "C"), ("It is not red but green", "D"),
        # none
        ("A or B", None), ("A, B", None), ("A and B are both right", None), ("B/C", None),
        ("The answer is A or B.", None), ("A man", None), ("E", None), ("", None), ("...", None),
        ("Answer: E", None), ("red or green", None), ("It is not red.", None),
        ("I cannot tell.", None), ("It has vitamin C in it, which is good for the people", None),
        ("A. red\nB. dark blue\nC. blue\nD. green", None), ("The answer is not B.", None),
    ],
)  # fmt: skip
def test_of_colours(text: str, chosen: str | None) -> None:
    assert choice_in(text, COLOURS) == chosen


@pytest.mark.parametrize(
    ("options", "text", "chosen"),
    [
        (NUMBERS, "5", "A"), (NUMBERS, "-5", "B"), (NUMBERS, "It is -5.", "B"),
        (NUMBERS, "It is 5.", "A"), (NUMBERS, "5.5", "C"), (NUMBERS, "about 5.5 m", "C"),
        (NUMBERS, "50", "D"), (NUMBERS, "50%", None), (NUMBERS, "B", "B"),
        (LANGUAGES, "C", "A"), (LANGUAGES, "C++", "B"), (LANGUAGES, "It is in C++.", "B"),
        (LANGUAGES, "It is in C.", "A"), (LANGUAGES, "B. C++", "B"), (LANGUAGES, "A. C", "A"),
        ((*LANGUAGES, "Java"), "C", "C"), ((*LANGUAGES, "Java"), "C++", "B"),
        (SENTENCES, "A man runs.", "B"), (SENTENCES, "A man runs", "B"), (SENTENCES, "A", "A"),
        (SENTENCES, "B. A man runs", "B"),
        (SENTENCES, "C. A woman walks a dog.", "C"),
        (SENTENCES, "In the video a woman walks a dog.", "C"), (SENTENCES, "A woman", None),
        (SENTENCES, "None of the above", "D"), (SENTENCES, "The answer is A man runs.", "B"),
        (SENTENCES, "The answer is A because a man walks.", "A"),
        (("+", "-"), "+", "A"), (("+", "-"), " - ", "B"), (("+", "-"), "*", None),
        (("Yes", "No"), "No, it is not.", "B"), (("yes", "no"), "Yes.", "A"),
        (("Plan B", "Plan A"), "Plan B", "A"), (("Plan B", "Plan A"), "B", "B"),
        (("same", "same"), "same", None),
        (("a", "b"), "A", "A"), (("红色", "绿色"), "是红色的", "A"),
        (tuple("123456789"), "I", "I"), (tuple("123456789"), "I think that it is 3.", "C"),
    ],
)  # fmt: skip
def test_of_other_options(options: tuple[str, ...], text: str, chosen: str | None) -> None:
    assert choice_in(text, options) == chosen
