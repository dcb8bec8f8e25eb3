"""The growth that ``python -m bench.answers.memory`` computes."""

from __future__ import annotations

import pytest

from bench.answers.memory import growth
from bench.base.clips import filmed_clip


def test_growth_compares_the_ends_behind_the_warm_up() -> None:
    samples = [{"target": 10.0}] * 5 + [{"target": 100.0}] * 30 + [{"target": 107.0}] * 25
    (row,) = growth(samples, num_warm_up=5)
    assert row["growth"] == pytest.approx(0.07)
    assert row["largest_mb"] == 107.0
    with pytest.raises(ValueError, match="at least 2 more"):
        growth(samples, num_warm_up=59)


def test_clips_of_different_numbers_differ() -> None:
    numbers = (0, 1, 255, 256, 257, 512, 1000)
    assert len({filmed_clip(n, width=64, height=64, num_frames=2) for n in numbers}) == len(numbers)
