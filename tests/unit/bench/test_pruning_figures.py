"""The pure parts of the pruning benchmark: intervals, boundary shares, accepted lengths."""

from __future__ import annotations

import random

import pytest

from bench.pruning.statistics import Counts, difference, interval
from bench.pruning.tables import accepted_tokens


def counted(clips: dict[str, tuple[int, int]]) -> Counts:
    counts = Counts.empty()
    for clip, (hits, total) in clips.items():
        counts.add_hits(clip, hits, total)
    return counts


def test_an_interval_is_of_all_tokens_and_resamples_clips() -> None:
    counts = counted({"a": (9, 10), "b": (45, 90)})
    found = interval(counts)
    assert found.mean == pytest.approx(54 / 100)
    assert (found.low, found.high) == pytest.approx((0.5, 0.9))  # all draws "b", all draws "a"
    assert found.half_width == pytest.approx(0.2)


def test_samples_of_one_clip_are_counted_together() -> None:
    counts = Counts.empty()
    counts.add_hits("a", 1, 2)
    counts.add_hits("a", 2, 2)
    assert counts.share == 0.75 and counts.num_clips == 1
    assert interval(counts).half_width == 0


def test_the_interval_narrows_with_the_number_of_clips() -> None:
    rng = random.Random(0)
    few = counted({str(clip): (rng.randint(80, 100), 100) for clip in range(10)})
    many = counted({str(clip): (rng.randint(80, 100), 100) for clip in range(400)})
    assert interval(many).half_width < interval(few).half_width / 3


def test_a_paired_difference_does_not_see_what_both_sides_share() -> None:
    first = counted({str(clip): (50 + clip, 100) for clip in range(40)})
    second = counted({str(clip): (48 + clip, 100) for clip in range(40)})
    found = difference(first, second)
    assert found.mean == pytest.approx(0.02)
    assert found.half_width == pytest.approx(0, abs=1e-9)
    assert interval(first).half_width > 0.02


def test_differences_of_other_clips_and_shares_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="same clips"):
        difference(counted({"a": (1, 1)}), counted({"b": (1, 1)}))
    with pytest.raises(ValueError, match="no clips"):
        interval(Counts.empty())


def test_accepted_tokens_are_those_between_rejections() -> None:
    """Of 100 tokens ten are wrong: nine right ones before each."""
    agreement = interval(counted({"a": (90, 100)})).as_dict()
    assert accepted_tokens(agreement) == "9.0 [9.0, 9.0]"
    assert accepted_tokens({"mean": 0.5, "low": 0.0, "high": 1.0}) == "1.0 [0.0, ∞]"
