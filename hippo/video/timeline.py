"""Presentation times of a video's frames, from the file's index or from all its packets."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import av
import av.error

from hippo.errors import MediaError
from hippo.video.limits import DecodeLimits


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

    @property
    def seconds(self) -> list[float]:
        """The times in seconds, from 0."""
        first, unit, units = self.ticks[0], self.base.numerator, self.base.denominator
        return [(tick - first) * unit / units for tick in self.ticks]


def timeline_of_index(
    container: av.container.InputContainer, stream: av.VideoStream, limits: DecodeLimits
) -> PresentationTimes | None:
    """Returns the timeline of a file whose index lists every frame, at a constant rate; else None.

    An index has the frames' decoding times. If these are evenly spaced, so are the presentation
    times, from the stream's start.
    """
    if "mp4" not in container.format.name or stream.frames < 2:
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
    container: av.container.InputContainer, stream: av.VideoStream, limits: DecodeLimits
) -> PresentationTimes:
    """Reads the whole file; raises MediaError if the file is damaged or has no frames."""
    ticks, keys = list[int](), list[int]()
    num_packets = num_shown = 0
    last = (-1, 0)  # greatest time, and the duration there
    with refusing("the video file is damaged or cut off ({})"):
        for packet in container.demux(stream):
            if packet.size <= 0:
                continue
            num_packets += 1
            limits.check_stored_frames(num_packets)
            tick = packet.pts
            if packet.is_keyframe and tick is not None:
                keys.append(tick)
            if packet.is_discard:
                continue
            num_shown += 1
            if tick is not None:
                ticks.append(tick)
            if num_shown == 1 or (tick or 0) > last[0]:
                last = tick or 0, packet.duration or 0
    if not num_shown:
        raise MediaError("the video has no frames")
    if stream.time_base is None or len(ticks) < num_shown:
        rate = _rate(stream)
        return PresentationTimes(
            range(num_shown), [], 1 / rate, float(num_shown / rate), is_stored=False
        )
    return _timeline(sorted(ticks), sorted(keys), last[1], stream)


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
