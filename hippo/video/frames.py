"""Decodes a video file's planned frames with PyAV, inside the worker process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import BinaryIO

import av
import av.error
import numpy as np

from hippo.errors import MediaError
from hippo.types import FramePlan
from hippo.video.images import Allocate, Frames, Pixels
from hippo.video.limits import DecodeLimits
from hippo.video.sampling import sample_frames

# Only containers that hold their media themselves; a playlist could name other files or URLs.
_FORMATS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,ivf,h264,hevc,3gp,m4v"
_READABLE = "mp4, mov, webm, mkv, avi, mpeg-ts or gif"
_IMAGE_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"BM": "BMP",
}
_FRAME = "a frame of the video"
_BUFFER_SIZE = 1 << 18
_THREADED_PIXELS = 200_000_000  # of all frames; for fewer, threads are slower
_MAX_BAD_SHARE = 0.1  # of packets that cannot be decoded


def read_video(
    file: BinaryIO,
    plan: FramePlan,
    limits: DecodeLimits,
    allocate: Allocate,
    *,
    num_threads: int = 1,
) -> Frames:
    """Returns the first video track's planned frames, upright; raises MediaError."""
    _check_head(file)
    file.seek(0)
    with _refusing(f"this is not a video that can be read; send {_READABLE}"):
        container = av.open(
            file,
            "r",
            options={"format_whitelist": _FORMATS},
            buffer_size=_BUFFER_SIZE,
            metadata_errors="replace",  # accepts a title in another encoding
        )
    with container:
        stream = _video_stream(container, limits)
        packets = _packets(container, stream, limits)
        context = stream.codec_context
        is_large = len(packets) * context.width * context.height >= _THREADED_PIXELS
        context.thread_count = num_threads if is_large else 1
        context.thread_type = "AUTO" if is_large else "NONE"
        timeline = _timeline(packets, stream)
        limits.check_duration(timeline.duration_s)
        limits.check_rate(len(timeline.ticks), timeline.duration_s)
        seconds = timeline.seconds
        indices = sample_frames(seconds, timeline.duration_s, plan)
        wanted = [timeline.ticks[index] for index in indices]
        if timeline.is_stored:
            frames = _decode(packets, stream, skippable=set(timeline.ticks) - set(wanted))
        else:
            frames = _numbered(_decode(packets, stream, skippable=set()))
        pixels = _convert(frames, wanted, limits, allocate)
        sampled_fps = len(indices) / timeline.duration_s
    return Frames(pixels, tuple(seconds[index] for index in indices), sampled_fps)


@contextlib.contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Turns FFmpeg errors into a MediaError; ``{}`` in ``message`` is FFmpeg's reason."""
    try:
        yield
    except MemoryError:
        raise
    except av.error.FFmpegError as error:
        raise MediaError(message.format(error.strerror)) from None


def _check_head(file: BinaryIO) -> None:
    """Raises MediaError for an image, and for an mp4 whose boxes exceed the file."""
    file.seek(0)
    head = file.read(16)
    for signature, name in _IMAGE_SIGNATURES.items():
        if head.startswith(signature):
            raise MediaError(f"this is a {name} image, not a video; send it as an image")
    if head[4:8] != b"ftyp":
        return
    size = file.seek(0, io.SEEK_END)
    offset = 0
    boxes = set()
    while offset + 8 <= size:
        file.seek(offset)
        header = file.read(16)
        length, box = int.from_bytes(header[:4], "big"), header[4:8]
        if length == 1:
            length = int.from_bytes(header[8:16], "big")
        elif length == 0:  # up to the end of the file
            length = size - offset
        if length < 8 or offset + length > size:
            raise MediaError(
                f"the mp4 is cut off or damaged: its {box.decode('latin-1')!r} box does not fit "
                f"into the {size:,} bytes of the file; send the whole file"
            )
        boxes.add(box)
        offset += length
    if not boxes & {b"moov", b"moof"}:
        raise MediaError("the mp4 is cut off: it has no index ('moov' box); send the whole file")


def _video_stream(container: av.container.InputContainer, limits: DecodeLimits) -> av.VideoStream:
    limits.check_streams(len(container.streams))
    stream = next(
        (
            stream
            for stream in container.streams.video
            if not stream.disposition & av.stream.Disposition.attached_pic
        ),
        None,
    )
    if stream is None:
        kinds = sorted({stream.type for stream in container.streams})
        found = f" (only {', '.join(kinds)})" if kinds else ""
        raise MediaError(f"the file has no video track that can be read{found}")
    context = stream.codec_context
    if context is None:
        raise MediaError(
            "the video's codec is unknown; h264, hevc, vp8, vp9, av1 and mpeg4 can be read"
        )
    limits.check_size(context.width, context.height, _FRAME)
    if container.duration is not None:
        limits.check_duration(container.duration / 1e6)
    return stream


def _packets(
    container: av.container.InputContainer, stream: av.VideoStream, limits: DecodeLimits
) -> list[av.Packet[av.VideoStream]]:
    packets = []
    with _refusing("the video file is damaged or cut off ({})"):
        for packet in container.demux(stream):
            if packet.size > 0:
                packets.append(packet)
                limits.check_stored_frames(len(packets))
    if all(packet.is_discard for packet in packets):
        raise MediaError("the video has no frames")
    return packets


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Presentation times (``ticks``) of all shown frames, ascending, in units of ``base`` s."""

    ticks: list[int]
    base: Fraction
    duration_s: float
    is_stored: bool  # whether the file has times; else a frame's tick is its index

    @property
    def seconds(self) -> list[float]:
        """The times in seconds, from 0."""
        return [float((tick - self.ticks[0]) * self.base) for tick in self.ticks]


def _timeline(packets: list[av.Packet[av.VideoStream]], stream: av.VideoStream) -> _Timeline:
    shown = [packet for packet in packets if not packet.is_discard]
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    base = stream.time_base
    ticks = sorted(packet.pts for packet in shown if packet.pts is not None)
    if base is None or len(ticks) < len(shown):
        count = len(shown)
        return _Timeline(list(range(count)), 1 / rate, float(count / rate), False)
    last = max(shown, key=lambda packet: packet.pts or 0).duration or 0
    duration = (ticks[-1] - ticks[0] + last) * base + (0 if last > 0 else 1 / rate)
    nominal = len(ticks) / rate
    if abs(nominal - duration) <= duration / 100:
        duration = nominal
    return _Timeline(ticks, base, float(duration), True)


def _numbered(frames: Iterator[av.VideoFrame]) -> Iterator[av.VideoFrame]:
    """Yields the frames with their indices as times."""
    for number, frame in enumerate(frames):
        frame.pts = number
        yield frame


def _decode(
    packets: list[av.Packet[av.VideoStream]], stream: av.VideoStream, *, skippable: set[int]
) -> Iterator[av.VideoFrame]:
    """Yields frames in presentation order, without frames at ``skippable`` times that no other
    frame refers to. Skips damaged packets; raises MediaError if there are too many.
    """
    num_bad = 0
    for packet in (*packets, None):
        is_skippable = packet is not None and packet.pts in skippable
        stream.codec_context.skip_frame = "NONREF" if is_skippable else "DEFAULT"
        try:
            yield from stream.decode(packet)
        except av.error.EOFError:
            return
        except MemoryError:
            raise
        except av.error.FFmpegError:
            num_bad += 1
            if num_bad > max(1, _MAX_BAD_SHARE * len(packets)):
                raise MediaError(
                    f"the video is damaged: {num_bad} of {len(packets)} frames cannot be decoded"
                ) from None


def _convert(
    frames: Iterator[av.VideoFrame],
    wanted: list[int],
    limits: DecodeLimits,
    allocate: Allocate,
) -> Pixels:
    """Returns the RGB frame on screen at each time in ``wanted`` (ticks, ascending)."""
    pixels: Pixels | None = None
    place = 0
    current: av.VideoFrame | None = None
    width = height = quarter_turns = 0

    def append_frame(frame: av.VideoFrame) -> None:
        nonlocal place
        assert pixels is not None
        with _refusing(
            "the video's colours cannot be converted ({}): what the file says about them is "
            "damaged; encode it again"
        ):
            rgb = frame.to_ndarray(format="rgb24", width=width, height=height, threads=1)
        pixels[place] = np.rot90(rgb, quarter_turns) if quarter_turns else rgb
        place += 1

    for frame in frames:
        if pixels is None:
            width, height = frame.width, frame.height
            limits.check_size(width, height, _FRAME)
            limits.check_memory(len(wanted), width, height)
            quarter_turns = round(frame.rotation / 90) % 4
            shape = (width, height) if quarter_turns % 2 else (height, width)
            pixels = allocate(len(wanted), *shape)
        if frame.width * frame.height != width * height:
            limits.check_size(frame.width, frame.height, _FRAME)
        if frame.pts is not None:
            while current is not None and place < len(wanted) and wanted[place] < frame.pts:
                append_frame(current)
            while place < len(wanted) and wanted[place] == frame.pts:
                append_frame(frame)
        current = frame
        if place == len(wanted):
            break
    if pixels is None or current is None:
        raise MediaError("the video has no frame that can be decoded")
    while place < len(wanted):
        append_frame(current)
    return pixels
