"""The pure parts of the pruning benchmark: intervals, boundary shares, accepted lengths."""

from __future__ import annotations

import random

import pytest
import torch

from bench.pruning.boundary import boundary_shares, ends_mask, ring_mask
from bench.pruning.readings import read_traces
from bench.pruning.statistics import Counts, difference, interval, mean_interval
from bench.simulate_policies import Machine


def counted(clips: dict[str, tuple[int, int]]) -> Counts:
    counts = Counts.empty()
    for clip, (hits, total) in clips.items():
        counts.add(clip, hits, total)
    return counts


def test_an_interval_is_of_all_tokens_and_resamples_clips() -> None:
    counts = counted({"a": (9, 10), "b": (45, 90)})
    found = interval(counts)
    assert found.mean == pytest.approx(54 / 100)
    assert (found.low, found.high) == pytest.approx((0.5, 0.9))  # all draws "b", all draws "a"
    assert found.half_width == pytest.approx(0.2)


def test_samples_of_one_clip_are_counted_together() -> None:
    counts = Counts.empty()
    counts.add("a", 1, 2)
    counts.add("a", 2, 2)
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
    with pytest.raises(ValueError, match="no clips"):
        mean_interval([])


def test_the_mean_of_one_value_a_clip_has_an_interval_around_it() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert found.low < found.mean == 2.5 < found.high


def test_the_outer_ring_is_a_fifth_of_19_by_19_and_three_quarters_of_4_by_4() -> None:
    assert ring_mask([(2, 19, 19)]).float().mean() == pytest.approx(0.2, abs=0.01)
    assert ring_mask([(3, 4, 4)]).float().mean() == 0.75
    assert ring_mask([(1, 1, 5)]).all()


def test_the_ends_are_a_tenth_at_either_side() -> None:
    mask = ends_mask(40)
    assert mask.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 36, 37, 38, 39]


def test_shares_at_the_boundary_are_of_kept_over_present() -> None:
    grids = [(2, 4, 4)]
    inner = torch.tensor([5, 6, 9, 10])
    shares = boundary_shares(inner, grids)
    assert (shares.ring_kept, shares.ring_present, shares.ring_ratio) == (0.0, 0.75, 0.0)
    every = boundary_shares(torch.arange(32), grids)
    assert every.ring_ratio == every.ends_ratio == 1.0
    assert boundary_shares(torch.tensor([0, 5]), grids).ends_kept == 0.5
    with pytest.raises(ValueError, match="no token"):
        boundary_shares(torch.empty(0, dtype=torch.int64), grids)


MACHINE = Machine(target_ms=10.0, noise=0.0)


def test_a_draft_that_is_always_right_fills_every_serial_block() -> None:
    readings = read_traces([[True] * 121], policy="serial", gamma=5, machine=MACHINE)
    assert readings.mean_tokens_per_forward == pytest.approx(6, abs=0.1)
    assert readings.mean_run_length > 100  # never rejected
    assert readings.decode_speedup > 2


def test_a_draft_that_is_never_right_gives_one_token_a_forward() -> None:
    readings = read_traces([[False] * 60], policy="serial", gamma=5, machine=MACHINE)
    assert readings.mean_tokens_per_forward == 1.0
    assert readings.mean_run_length == 1.0
    assert readings.decode_speedup < 1


def test_the_readings_of_a_trace_by_hand() -> None:
    # Token 0 is the prefill's. Serial blocks of 3: d1 d2 d3 + 1, then d5 right, d6 wrong.
    trace = [True, True, True, True, True, True, False, True]
    readings = read_traces([trace], policy="serial", gamma=3, machine=MACHINE)
    assert readings.mean_tokens_per_forward > 2


def test_traces_of_one_token_are_left_to_the_prefill() -> None:
    longer = [[True] * 20]
    assert read_traces([[True], *longer], policy="vpsd", gamma=5, machine=MACHINE) == read_traces(
        longer, policy="vpsd", gamma=5, machine=MACHINE
    )
