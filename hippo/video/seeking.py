"""Decodes the frames on screen at given times, from the key frame before each."""

import bisect
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import av
import av.error

from hippo.errors import MediaError
from hippo.video.timeline import PresentationTimes, Segment, file_of

_Packet: TypeAlias = "av.Packet[av.VideoStream]"
_MAX_BAD_SHARE = 0.1  # the largest share of packets that cannot be decoded
# Codecs whose decoders have nothing that only earlier packets brought (a palette, say) when they
# begin at a key frame.
_STARTS_AT_KEYS = frozenset(
    "av1 cfhd dnxhd dvvideo ffv1 ffvhuff flv1 h263 h264 hevc huffyuv jpeg2000 mjpeg mpeg1video "
    "mpeg2video mpeg4 msmpeg4v2 msmpeg4v3 png prores rawvideo theora utvideo v210 vc1 vp8 vp9 vvc "
    "wmv1 wmv2 wmv3".split()
)
_EARLIER_S = 2.0  # a seek may end behind its aim if packets are stored far from their times


class SeekError(Exception):
    """Decoding from key frames may differ from decoding the whole file."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Wanted times (ticks) from a key frame on, before the next key frame."""

    previous: int  # the key frame before the run's
    key: int
    wanted: list[int]


def seek_frames(
    stream: av.VideoStream, timeline: PresentationTimes, wanted: Sequence[int]
) -> Iterator[av.VideoFrame]:
    """Yields the frame on screen at each time in ``wanted`` (ticks, ascending), and reads and
    decodes only from the key frames before them.

    Raises SeekError if ``all_frames`` may give other frames.
    """
    context = stream.codec_context
    knows_state = context.codec.canonical_name in _STARTS_AT_KEYS and context.pix_fmt != "pal8"
    if not knows_state or timeline.segments:
        raise SeekError
    try:
        for run in _runs(wanted, timeline):
            packets = _seek(stream, run, timeline.base)
            stream.codec_context.flush_buffers()
            frames = _from_key(packets, stream, set(run.wanted))
            for tick, frame in zip(run.wanted, _on_screen(frames, run.wanted), strict=True):
                shown = frame.pts
                is_wrong = shown is None or shown > tick or (timeline.is_computed and shown < tick)
                if is_wrong or frame.is_corrupt:
                    raise SeekError
                yield frame
    except MemoryError:
        raise
    except (av.error.FFmpegError, MediaError):
        raise SeekError from None


def all_frames(
    stream: av.VideoStream, timeline: PresentationTimes, wanted: Sequence[int]
) -> Iterator[av.VideoFrame]:
    """Yields the frames of ``seek_frames``, but decodes the file from its beginning.

    Skips damaged packets; raises MediaError if there are too many, or if there is no frame.
    """
    num_stored = len(timeline.ticks) + timeline.num_undecodable
    needed = set(wanted) if timeline.is_stored and not timeline.segments else None
    max_bad = max(1, int(_MAX_BAD_SHARE * num_stored))
    num_bad = itertools.count(1)

    def skip(packet: "_Packet | None") -> None:
        if timeline.num_undecodable and packet is not None and (packet.pts or 0) < timeline.keys[0]:
            return
        if (number := next(num_bad)) > max_bad:
            raise MediaError(
                f"the video is damaged: {number} of {num_stored} frames cannot be decoded"
            ) from None

    frames = _decode(file_of(stream).demux(stream), stream, needed, skip)
    if timeline.segments:
        frames = _following(frames, timeline.segments)
    yield from _on_screen(frames if timeline.is_stored else _numbered(frames), wanted)


def num_from_keys(timeline: PresentationTimes, wanted: Sequence[int]) -> int:
    """Returns how many frames ``seek_frames`` reads from the key frames on; raises SeekError."""
    ticks = timeline.ticks
    return sum(
        bisect.bisect_right(ticks, run.wanted[-1]) - bisect.bisect_left(ticks, run.key)
        for run in _runs(wanted, timeline)
    )


def _runs(wanted: Sequence[int], timeline: PresentationTimes) -> list[_Run]:
    runs: list[_Run] = []
    for tick in wanted:
        place = bisect.bisect_right(timeline.keys, tick) - 1
        if place < 0:
            raise SeekError
        key = timeline.keys[place]
        if runs and key <= runs[-1].wanted[-1]:
            runs[-1].wanted.append(tick)
        else:
            runs.append(_Run(timeline.keys[max(place - 1, 0)], key, [tick]))
    return runs


def _seek(stream: av.VideoStream, run: _Run, base: Fraction) -> Iterator[_Packet]:
    """Returns the packets from the run's key frame on, or from the key frame before it."""
    wanted = run.wanted[0]
    earlier = run.previous - round(_EARLIER_S / base)
    for aim, least in ((wanted, run.key), (run.key, run.key), (earlier, run.previous)):
        file_of(stream).seek(aim, stream=stream)
        packets = file_of(stream).demux(stream)
        for packet in packets:
            if packet.is_keyframe and packet.pts is not None and packet.pts >= least:
                if packet.pts <= wanted:
                    return itertools.chain((packet,), packets)
                break
    raise SeekError


def _from_key(
    packets: Iterator[_Packet], stream: av.VideoStream, wanted: Container[int]
) -> Iterator[av.VideoFrame]:
    """Yields the frames from the key frame on, which is the first packet's."""
    first = next(packets)
    assert first.pts is not None
    key = first.pts

    def skip(packet: "_Packet | None") -> None:
        """Skips frames that are shown before the key frame, but stored behind it."""
        if packet is None or packet.pts is None or packet.pts >= key:
            raise SeekError

    is_begun = first.is_discard  # such a frame is decoded and not returned
    for frame in _decode(itertools.chain((first,), packets), stream, wanted, skip):
        if frame.pts is None:
            raise SeekError
        if frame.pts < key:
            continue
        if not is_begun and frame.pts != key:
            raise SeekError  # the decoder has dropped frames that it could not restore
        is_begun = True
        yield frame


def _decode(
    packets: Iterable[_Packet],
    stream: av.VideoStream,
    wanted: Container[int] | None,
    on_error: "Callable[[_Packet | None], None]",
) -> Iterator[av.VideoFrame]:
    """Yields frames in presentation order, without frames at times outside of ``wanted`` that no
    other frame refers to (None: all are wanted). Calls ``on_error`` for a packet that cannot be
    decoded."""
    for packet in packets:
        is_wanted = wanted is None or packet.pts is None or packet.pts in wanted
        stream.codec_context.skip_frame = "DEFAULT" if is_wanted else "NONREF"
        try:
            yield from stream.decode(packet if packet.size else None)
        except av.error.EOFError:
            return
        except MemoryError:
            raise
        except av.error.FFmpegError:
            on_error(packet if packet.size else None)


def _numbered(frames: Iterator[av.VideoFrame]) -> Iterator[av.VideoFrame]:
    for number, frame in enumerate(frames):
        frame.pts = number
        yield frame


def _following(
    frames: Iterator[av.VideoFrame], segments: Sequence[Segment]
) -> Iterator[av.VideoFrame]:
    """Yields the frames with the times that place the segments one after another. Within one, a
    decoder gives frames in the order of their times."""
    place, before = 0, segments[0].first - 1
    for frame in frames:
        if (shown := frame.pts) is None:
            continue
        if (shown <= before or shown > segments[place].last) and place + 1 < len(segments):
            place += 1
        before = shown
        frame.pts = shown + segments[place].offset
        yield frame


def _on_screen(frames: Iterator[av.VideoFrame], wanted: Sequence[int]) -> Iterator[av.VideoFrame]:
    """Yields the last frame that is not behind each time, or the first frame of all."""
    place = 0
    current: av.VideoFrame | None = None
    for frame in frames:
        if frame.pts is not None:
            while current is not None and place < len(wanted) and wanted[place] < frame.pts:
                yield current
                place += 1
            while place < len(wanted) and wanted[place] == frame.pts:
                yield frame
                place += 1
        current = frame
        if place == len(wanted):
            return
    if current is None:
        raise MediaError("the video has no frame that can be decoded")
    for _ in wanted[place:]:
        yield current
