"""Windows of an answer and their trend."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.long_clip import num_visual_tokens
from bench.long_figures import fastest_forwards, trend, windows_of


def verdicts(*steps: tuple[float, int]) -> list[dict[str, Any]]:
    """Verdicts that take so many milliseconds and settle so many tokens, after the prefill's."""
    at, made = 7.0, [{"at": 7.0, "tokens": 1}]
    for duration, tokens in steps:
        at += duration
        made.append({"at": at, "tokens": tokens})
    return made


def test_equal_steps_make_equal_windows_without_a_trend() -> None:
    windows = windows_of(verdicts(*[(5.0, 1)] * 40), width=8)
    assert windows.ms == pytest.approx([5.0] * 5)
    assert windows.slope == pytest.approx(0.0, abs=1e-9)


def test_tokens_of_one_verdict_share_its_time() -> None:
    windows = windows_of(verdicts(*[(12.0, 4)] * 10), width=10)
    assert windows.ms == pytest.approx([3.0] * 4)


def test_steps_that_grow_have_a_trend_beyond_its_error() -> None:
    windows = windows_of(verdicts(*[(5.0 + index / 100, 1) for index in range(80)]), width=8)
    assert windows.slope == pytest.approx(10.0, rel=0.01)  # ms a token over 1,000 tokens
    assert windows.error < 0.1


def test_the_trend_of_two_points_has_no_error_to_tell() -> None:
    assert all(map(math.isnan, trend([0.0, 1.0], [1.0, 2.0])))


def test_a_clip_has_as_many_tokens_as_asked_for_or_is_refused() -> None:
    assert num_visual_tokens(128, 560) == 25_600
    with pytest.raises(ValueError, match="multiple of 28"):
        num_visual_tokens(128, 561)


def test_the_fastest_forward_of_each_window_is_of_one_row_and_not_the_prefills() -> None:
    forwards = [(90.0, 1), (5.0, 1), (4.0, 1), (1.0, 3), (7.0, 1), (6.0, 1)]
    made = [{"forward": duration, "rows": rows} for duration, rows in forwards]
    assert fastest_forwards(made, width=2) == [4.0, 6.0]
