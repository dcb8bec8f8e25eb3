"""Presentation times of a video's frames, from the file's index or from all its packets."""

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import av
import av.error

from hippo.errors import MediaError
from hippo.media.limits import DecodeLimits

# A clock that goes back by more, or forward by more in a container whose clock may jump, begins
# anew; the second is FFmpeg's dts_delta_threshold.
_BACK_S, _FORWARD_S = 0.3, 10.0
_TS_DISCONT = 0x200  # AVFMT_TS_DISCONT of FFmpeg: the container's clock may jump


@dataclass(slots=True)
class Segment:
    """Stored times (ticks) between two restarts of the file's clock: from ``first`` to ``last``,
    shown for ``last_duration``. ``offset`` is what makes them follow the segment before."""

    first: int
    last: int
    last_duration: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class PresentationTimes:
    """Presentation times (ticks) of all shown frames and of the key frames, ascending, in units of
    ``base`` seconds."""

    ticks: Sequence[int]
    keys: Sequence[int]  # from the index: at the key frames' times or earlier
    base: Fraction
    duration_s: float
    is_stored: bool = True  # whether the file has times; else a frame's tick is its index
    is_computed: bool = False  # from the index; decoding must confirm the times
    segments: Sequence[Segment] = ()  # if the clock restarts: two or more
    num_undecodable: int = 0  # frames before the first key frame, which ``ticks`` leave out
    undecodable_s: float = 0.0  # their time

    @property
    def seconds(self) -> list[float]:
        """The times in seconds, from 0."""
        first, unit, units = self.ticks[0], self.base.numerator, self.base.denominator
        return [(tick - first) * unit / units for tick in self.ticks]


def file_of(stream: av.VideoStream) -> av.container.InputContainer:
    return cast(av.container.InputContainer, stream.container)


def timeline_of_index(stream: av.VideoStream, limits: DecodeLimits) -> PresentationTimes | None:
    """Returns the timeline of a file whose index lists every frame, at a constant rate; else None.

    An index has the frames' decoding times. If these are evenly spaced, so are the presentation
    times, from the stream's start.
    """
    if "mp4" not in stream.container.format.name or stream.frames < 2:
        return None
    if len(stream.index_entries) != stream.frames or None in (stream.start_time, stream.time_base):
        return None
    limits.check_stored_frames(stream.frames)
    times, keys = [], []
    for number, entry in enumerate(stream.index_entries):
        if entry.is_discard:
            return None
        times.append(entry.timestamp)
        if entry.is_keyframe:
            keys.append(number)
        elif not keys:
            return None
    step = times[1] - times[0]
    if step <= 0 or any(after - before != step for before, after in itertools.pairwise(times)):
        return None
    assert stream.start_time is not None and stream.time_base is not None
    start = stream.start_time
    ticks = range(start, start + len(times) * step, step)
    # A key frame is not shown before the frames that are stored before it.
    keys = [ticks[number] for number in keys]
    return replace(_timeline(ticks, keys, step, stream), is_computed=True)


def timeline_of_packets(
    stream: av.VideoStream, limits: DecodeLimits, *, is_cut: bool = False
) -> PresentationTimes:
    """Reads the whole file, and a file that ``is_cut`` as far as it goes; raises MediaError if the
    file is damaged or has no frames."""
    clock = _Clock(stream)
    ticks, keys = list[int](), list[int]()
    num_packets = num_shown = 0
    with refusing("the video file is damaged or cut off ({})"):
        for packet in _up_to_the_cut(file_of(stream).demux(stream), is_cut):
            if packet.size <= 0:
                continue
            num_packets += 1
            limits.check_stored_frames(num_packets)
            tick = clock.place(packet)
            if packet.is_keyframe and tick is not None:
                keys.append(tick)
            if packet.is_discard:
                continue
            num_shown += 1
            if tick is not None:
                ticks.append(tick)
    if not num_shown:
        raise MediaError(
            "the mp4 is cut off before its first frame; send the whole file"
            if is_cut
            else "the video has no frames"
        )
    if stream.time_base is None or len(ticks) < num_shown:
        rate = _rate(stream)
        return PresentationTimes(
            range(num_shown), [], 1 / rate, float(num_shown / rate), is_stored=False
        )
    ticks.sort()
    keys.sort()
    num_before = bisect.bisect_left(ticks, keys[0]) if keys and keys[0] <= ticks[-1] else 0
    before_s = (ticks[num_before] - ticks[0]) * stream.time_base if num_before else 0
    timeline = _timeline(ticks[num_before:], keys, clock.segments[-1].last_duration, stream)
    return replace(
        timeline,
        segments=clock.segments if len(clock.segments) > 1 else (),
        num_undecodable=num_before,
        undecodable_s=float(before_s),
    )


def _up_to_the_cut(
    packets: "Iterator[av.Packet[av.VideoStream]]", is_cut: bool
) -> "Iterator[av.Packet[av.VideoStream]]":
    """Yields the packets; if the file is cut, the first that is not whole is the end."""
    try:
        for packet in packets:
            if is_cut and packet.is_corrupt:
                return
            yield packet
    except av.error.FFmpegError:
        if not is_cut:
            raise


class _Clock:
    """Places packets of a file whose clock may restart on one timeline."""

    def __init__(self, stream: av.VideoStream) -> None:
        can_jump = stream.container.format.flags & _TS_DISCONT
        base = stream.time_base or Fraction(1)
        self.segments: list[Segment] = []
        self._back = round(_BACK_S / base)
        self._forward = round(_FORWARD_S / base) if can_jump else None
        self._step = round(1 / (_rate(stream) * base))  # what a frame without a duration takes
        self._decoded: int | None = None  # when the packet before is decoded

    def place(self, packet: "av.Packet[av.VideoStream]") -> int | None:
        """Returns the packet's presentation time; None if it has none."""
        shown, before = packet.pts, self._decoded
        if shown is None:
            return None
        if packet.dts is not None:  # FFmpeg does not know it of the first packets of some files
            self._decoded = packet.dts
        restarts = (
            before is not None
            and packet.dts is not None
            and (
                packet.dts < before - self._back
                or (self._forward is not None and packet.dts > before + self._forward)
            )
        )
        if not self.segments:
            self.segments.append(Segment(shown, shown, packet.duration or 0))
        elif restarts:
            last = self.segments[-1]
            end = last.last + (last.last_duration or self._step) + last.offset
            self.segments.append(Segment(shown, shown, packet.duration or 0, end - shown))
        segment = self.segments[-1]
        segment.first = min(segment.first, shown)
        if shown >= segment.last:
            segment.last, segment.last_duration = shown, packet.duration or 0
        return shown + segment.offset


def _timeline(
    ticks: Sequence[int], keys: Sequence[int], last_duration: int, stream: av.VideoStream
) -> PresentationTimes:
    base, rate = stream.time_base, _rate(stream)
    assert base is not None
    duration = (ticks[-1] - ticks[0] + last_duration) * base
    if last_duration <= 0:
        duration += 1 / rate
    nominal = len(ticks) / rate
    if abs(nominal - duration) <= duration / 100:
        duration = nominal
    return PresentationTimes(ticks, keys, base, float(duration))


def _rate(stream: av.VideoStream) -> Fraction:
    return stream.average_rate or stream.guessed_rate or Fraction(25)


@contextlib.contextmanager
def refusing(message: str) -> Iterator[None]:
    """Turns FFmpeg errors into a MediaError; ``{}`` in ``message`` is FFmpeg's reason."""
    try:
        yield
    except MemoryError:
        raise
    except av.error.FFmpegError as error:
        raise MediaError(message.format(error.strerror)) from None
