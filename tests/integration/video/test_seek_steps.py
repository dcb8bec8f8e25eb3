"""The steps of seeking, each alone; and files that PyAV writes, whose frames are told apart."""

import itertools
from collections.abc import Container, Iterator, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av.error
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hippo.errors import MediaError
from hippo.video import seeking
from hippo.video.seeking import SeekError, all_frames, seek_frames
from hippo.video.timeline import PresentationTimes

BASE = Fraction(1, 10)


def times(keys: Sequence[int], *, num_ticks: int = 100, **changes: Any) -> PresentationTimes:
    return PresentationTimes(range(num_ticks), keys, BASE, num_ticks / 10, **changes)


def packet(tick: int | None, *, is_key: bool = False, **changes: Any) -> Any:
    """A packet that decodes to a frame at the same time."""
    values = {"pts": tick, "is_keyframe": is_key, "is_discard": False, "size": 1}
    return SimpleNamespace(**(values | changes))


def frame(tick: int | None, *, is_corrupt: bool = False) -> Any:
    return SimpleNamespace(pts=tick, is_corrupt=is_corrupt)


class Stream:
    """A file and its decoder: for each aim the packets from there on, of which each gives a frame,
    except those at the times ``bad``."""

    def __init__(self, places: dict[int, list[Any]], bad: Container[int | None] = ()) -> None:
        self.places, self.bad = places, bad
        self.aims = [0]  # where a file is at first
        self.container = self
        self.codec_context = SimpleNamespace(
            flush_buffers=lambda: None,
            codec=SimpleNamespace(canonical_name="h264"),
            pix_fmt="yuv420p",
        )

    def seek(self, aim: int, *, stream: Any) -> None:
        self.aims.append(aim)

    def demux(self, stream: Any) -> Iterator[Any]:
        return iter(self.places[self.aims[-1]])

    def decode(self, given: Any) -> list[Any]:
        if given.pts in self.bad:
            raise av.error.InvalidDataError(1, "damaged")
        return [frame(given.pts)]


@given(
    keys=st.sets(st.integers(0, 99), min_size=1).map(sorted),
    wanted=st.lists(st.integers(0, 99), min_size=1, max_size=20).map(sorted),
)
def test_each_run_goes_from_the_last_key_frame_before_its_times_to_the_next(
    keys: list[int], wanted: list[int]
) -> None:
    if wanted[0] < keys[0]:
        with pytest.raises(SeekError):
            seeking._runs(wanted, times(keys))
        return
    runs = seeking._runs(wanted, times(keys))
    assert [tick for run in runs for tick in run.wanted] == wanted
    for run in runs:
        before = [key for key in keys if key <= run.wanted[0]]
        assert run.key == before[-1]
        assert run.previous == (before[-2] if len(before) > 1 else before[-1])
    for run, after in itertools.pairwise(runs):
        assert after.key > run.wanted[-1], "what one run has decoded is not decoded again"
    for run in runs:
        for earlier, later in itertools.pairwise(run.wanted):
            assert max(key for key in keys if key <= later) <= earlier, "no key frame between"


@given(
    shown=st.sets(st.integers(0, 30), min_size=1, max_size=12).map(sorted),
    wanted=st.lists(st.integers(0, 35), min_size=1, max_size=12).map(sorted),
)
def test_on_screen_is_the_last_frame_that_is_not_later(shown: list[int], wanted: list[int]) -> None:
    seen = seeking._on_screen(map(frame, shown), wanted)
    expected = [max((tick for tick in shown if tick <= at), default=shown[0]) for at in wanted]
    assert [each.pts for each in seen] == expected


RUN = seeking._Run(previous=20, key=40, wanted=[47, 52])
EARLIER = 20 - 20  # two seconds before the key frame before


def key(tick: int) -> Any:
    return packet(tick, is_key=True)


@pytest.mark.parametrize(
    ("places", "first", "aims"),
    [
        ({47: [key(40), packet(41)]}, 40, [47]),
        ({47: [key(20), packet(30), key(40), packet(41)]}, 40, [47]),  # ends too early
        ({47: [key(60)], 40: [key(40)]}, 40, [47, 40]),  # too late
        ({47: [packet(45), key(60)], 40: [packet(50)], EARLIER: [key(20)]}, 20, [47, 40, EARLIER]),
        ({47: [key(47)]}, 47, [47]),  # the frame itself is a key frame that no index told
        ({47: [packet(None, is_key=True), key(40)]}, 40, [47]),
    ],
)
def test_packets_begin_with_a_key_frame_that_is_not_behind_the_time(
    places: dict[int, list[Any]], first: int, aims: list[int]
) -> None:
    stream: Any = Stream(places)
    packets = list(seeking._seek(stream, RUN, BASE))
    assert packets[0].pts == first and stream.aims[1:] == aims
    end = places[aims[-1]]
    assert packets == end[end.index(packets[0]) :], "the rest follows"


def test_without_such_a_key_frame_nothing_is_sought() -> None:
    stream: Any = Stream({47: [key(60)], 40: [key(60)], EARLIER: [key(0), packet(21)]})
    with pytest.raises(SeekError):
        seeking._seek(stream, RUN, BASE)
    assert stream.aims[1:] == [47, 40, EARLIER]


def decoded(packets: Sequence[Any], bad: Container[int | None] = ()) -> list[int | None]:
    stream: Any = Stream({}, bad)
    return [each.pts for each in seeking._from_key(iter(packets), stream, {41})]


def test_frames_shown_before_the_key_frame_are_left_out() -> None:
    assert decoded([key(40), packet(38), packet(39), packet(41)]) == [40, 41]
    assert decoded([key(40), packet(38), packet(41)], bad={38}) == [40, 41]


@pytest.mark.parametrize(
    ("packets", "bad"),
    [
        ([key(40), packet(41)], {41}),
        ([key(40), packet(41)], {40}),
        ([packet(40, is_key=True, is_discard=True), packet(41)], {40}),
        ([key(40), packet(None)], {None}),
        ([key(40), packet(None)], set()),
    ],
)
def test_what_the_decoder_cannot_restore_is_not_guessed(
    packets: list[Any], bad: set[int | None]
) -> None:
    with pytest.raises(SeekError):
        decoded(packets, bad)


@pytest.mark.parametrize("is_discard", [True, False])
def test_only_behind_a_discarded_key_frame_the_first_shown_may_be_later(is_discard: bool) -> None:
    first = packet(40, is_key=True, is_discard=is_discard)
    stream: Any = Stream({})
    stream.decode = lambda given: [] if given is first else [frame(given.pts)]
    found = seeking._from_key(iter([first, packet(42)]), stream, {42})
    if is_discard:
        assert [each.pts for each in found] == [42]
        return
    with pytest.raises(SeekError):  # the decoder has dropped what it could not restore
        next(found)


def sought(frames: Sequence[Any], timeline: PresentationTimes, wanted: Sequence[int]) -> list[Any]:
    stream: Any = Stream({tick: [key(0)] for tick in (0, *wanted)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeking, "_from_key", lambda *_: iter(frames))
        return list(seek_frames(stream, timeline, wanted))


def test_a_frame_that_is_not_the_one_on_screen_is_refused() -> None:
    plain, computed = times([0]), times([0], is_computed=True)
    assert [each.pts for each in sought([frame(0), frame(4)], plain, [2, 4])] == [0, 4]
    assert [each.pts for each in sought([frame(2), frame(4)], computed, [2, 4])] == [2, 4]
    for frames, timeline, wanted in (
        ([frame(0), frame(4)], computed, [2, 4]),  # at 2 there is none, as the index says
        ([frame(3)], plain, [2]),  # too late
        ([frame(None)], plain, [2]),
        ([frame(2, is_corrupt=True)], plain, [2]),
        ([], plain, [2]),
    ):
        with pytest.raises(SeekError):
            sought(frames, timeline, wanted)


@pytest.mark.parametrize(
    ("num_stored", "num_bad", "is_read"),
    [(40, 4, True), (40, 5, False), (5, 1, True), (5, 2, False), (20, 2, True), (20, 3, False)],
)
def test_a_tenth_of_the_frames_may_be_damaged_and_always_one(
    num_stored: int, num_bad: int, is_read: bool
) -> None:
    stream: Any = Stream({0: list(map(packet, range(num_stored)))}, range(1, 1 + num_bad))
    wanted = [0, num_stored - 1]
    found = all_frames(stream, times([0], num_ticks=num_stored), wanted)
    if is_read:
        assert [each.pts for each in found] == wanted
        return
    with pytest.raises(MediaError, match=f"{num_bad} of {num_stored} frames cannot be decoded"):
        list(found)
