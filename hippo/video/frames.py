"""Decodes a video file's planned frames with PyAV, inside the worker process."""

import contextlib
import io
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from typing import BinaryIO

import av
import numpy as np
from PIL import Image

from hippo.errors import MediaError
from hippo.media.formats import CODECS, FFMPEG_OPTIONS
from hippo.media.limits import DecodeLimits
from hippo.media.resizing import fit_frames, fit_size
from hippo.media.sampling import count_frames, sample_frames
from hippo.media.signatures import HEAD_BYTES, fault, image_kind
from hippo.video.as_shown import deinterlaced, has_high_range, in_standard_range, shown_size
from hippo.video.canvas import Canvas, Frames, Orientation, Pixels
from hippo.video.images import WHITE, over
from hippo.video.seeking import SeekError, all_frames, num_from_keys, seek_frames
from hippo.video.timeline import PresentationTimes, refusing, timeline_of_index, timeline_of_packets

_READABLE = "mp4, mov, webm, mkv, avi, mpeg-ts or gif"
_OF_THE_VIDEO = (b"mdat", b"moov", b"moof")
_INSTEAD = {
    "an animated WebP": "send it as mp4, webm or gif, or as an image of its first frame",
    "a HEIC image": "send it as an image in jpeg, png, webp or avif",
    "an SVG drawing": "send it as an image in png",
}
_FRAME = "a frame of the video"
_NO_VIDEO = av.stream.Disposition.attached_pic | av.stream.Disposition.timed_thumbnails
_BUFFER_SIZE = 1 << 18
_THREADED_PIXELS = 200_000_000  # all frames together; for fewer pixels, threads are slower
_THREAD_BYTES = 9
"""A thread's memory of a pixel: two frames of 4:2:0 in 10 bits, and a frame in RGB. Together the
threads take half of the memory allowed."""


def read_video(file: BinaryIO, canvas: Canvas) -> Frames:
    """Returns the first video track's planned frames, upright and resized; raises MediaError.

    Only the frames from the key frame before each planned frame on are read and decoded. If that
    might give other frames than decoding the whole file, the whole file is decoded.
    """
    is_cut = _check_head(file)
    with _track(file, canvas.limits) as stream:
        num_stored = stream.frames
        if not is_cut and (timeline := timeline_of_index(stream, canvas.limits)):
            with contextlib.suppress(SeekError):
                return _read(seek_frames, stream, timeline, canvas)
    with _track(file, canvas.limits) as stream:
        timeline = timeline_of_packets(stream, canvas.limits, is_cut=is_cut)
        notes = _notes(timeline, num_stored if is_cut else None)
        with contextlib.suppress(SeekError):
            return replace(_read(seek_frames, stream, timeline, canvas), notes=notes)
    with _track(file, canvas.limits) as stream:
        return replace(_read(all_frames, stream, timeline, canvas), notes=notes)


def _notes(timeline: PresentationTimes, num_stored: int | None) -> tuple[str, ...]:
    """Says what of the file cannot be used. ``num_stored`` are the frames in the index of a file
    that is cut off (0 in one of fragments); raises MediaError if less than half of them are there.
    """
    notes = []
    if timeline.num_undecodable:
        notes.append(
            f"the first {timeline.undecodable_s:.1f} s of the video cannot be decoded, because its "
            "first key frame comes after them"
        )
    if num_stored == 0:
        notes.append("the file is cut off; what is there is used")
    elif num_stored is not None:
        found = len(timeline.ticks) + timeline.num_undecodable
        if found < num_stored / 2:
            raise MediaError(
                f"the mp4 is cut off: {found:,} of its {num_stored:,} frames are there; send the "
                "whole file"
            )
        notes.append(f"the file is cut off behind {found:,} of its {num_stored:,} frames")
    return tuple(notes)


@contextlib.contextmanager
def _track(file: BinaryIO, limits: DecodeLimits) -> Iterator[av.VideoStream]:
    """Opens the file, and yields the track that players show: no cover and no thumbnails; an
    enabled or default track before others, then the largest track, then the first."""
    container = _opened(file)
    if any(_is_read(each) and not each.codec_context.width for each in container.streams.video):
        # FFmpeg looks at the first five seconds for sizes; a recording may have none in them.
        container.close()
        size, microseconds = file.seek(0, io.SEEK_END), int(1e6 * limits.max_duration_s)
        container = _opened(file, probesize=str(size), analyzeduration=str(microseconds))
    with container:
        yield _shown_track(container, limits)


def _opened(file: BinaryIO, **options: str) -> av.container.InputContainer:
    file.seek(0)
    problem = fault(file.read(HEAD_BYTES), "video", _READABLE)
    file.seek(0)
    with refusing(problem):
        return av.open(
            file,
            "r",
            options={**FFMPEG_OPTIONS, **options},
            buffer_size=_BUFFER_SIZE,
            metadata_errors="replace",  # accepts a title in another encoding
        )


def _read(
    decode: Callable[..., Iterator[av.VideoFrame]],
    stream: av.VideoStream,
    timeline: PresentationTimes,
    canvas: Canvas,
) -> Frames:
    """Decodes the frames of a timeline with ``seek_frames`` or ``all_frames``."""
    context, plan, frame_limits = stream.codec_context, canvas.plan, canvas.frame_limits
    total, duration_s = len(timeline.ticks), timeline.duration_s
    canvas.limits.check_times(total, duration_s)
    aspect = stream.sample_aspect_ratio if frame_limits.as_shown else None
    width, height = shown_size(context.width, context.height, aspect)
    canvas.limits.check_size(width, height, _FRAME)
    count = count_frames(total, duration_s, plan, frame_limits.frame_multiple)
    count = fit_frames(count, height, width, plan, frame_limits)
    seconds = timeline.seconds
    indices = sample_frames(seconds, duration_s, count)
    num_pixels = max(context.width * context.height, 1)
    is_large = total * num_pixels >= _THREADED_PIXELS
    fitting = canvas.limits.max_memory_bytes // 2 // (_THREAD_BYTES * num_pixels)
    num_threads = max(1, min(canvas.num_threads, fitting)) if is_large else 1
    context.thread_count = num_threads
    context.thread_type = "AUTO" if is_large else "NONE"
    wanted = [timeline.ticks[index] for index in indices]
    num_decoded = num_from_keys(timeline, wanted) if decode is seek_frames else indices[-1] + 1
    canvas.check_cost(num_decoded, len(set(wanted)), (context.width, context.height), num_threads)
    frames = decode(stream, timeline, wanted)
    pixels = _draw(frames, count, canvas, num_threads, aspect)
    return Frames(pixels, tuple(seconds[index] for index in indices), count / duration_s)


def _draw(
    frames: Iterator[av.VideoFrame],
    count: int,
    canvas: Canvas,
    num_threads: int,
    aspect: Fraction | None,
) -> Pixels:
    """Draws ``count`` frames, on several threads while the next ones are decoded."""

    def shown(frame: av.VideoFrame) -> tuple[int, int]:
        canvas.limits.check_size(frame.width, frame.height, _FRAME)
        size = shown_size(frame.width, frame.height, aspect)
        canvas.limits.check_size(*size, _FRAME)
        return size

    first = next(frames)
    orientation = Orientation.of(first)
    width, height = shown(first)
    upright = (width, height) if orientation.is_transposed else (height, width)
    size = fit_size(count, *upright, canvas.plan, canvas.frame_limits)
    pixels = canvas.allocate_frames(count, size)
    target = size[::-1] if orientation.is_transposed else size

    def draw(frame: av.VideoFrame, place: int) -> None:
        with refusing(
            "the video's colours cannot be converted ({}): what the file says about them is "
            "damaged; encode it again"
        ):
            rgb = _as_shown(frame, target) if canvas.frame_limits.as_shown else _opaque(frame)
        canvas.draw(orientation.applied(rgb), pixels[place])

    running, copies = deque[Future[None]](), list[int]()
    before: av.VideoFrame | None = None
    with ThreadPoolExecutor(num_threads) as pool:
        for place, frame in enumerate(itertools.chain((first,), frames)):
            if frame is before:
                copies.append(place)
                continue
            before = frame
            shown(frame)
            running.append(pool.submit(draw, frame, place))
            if len(running) > num_threads:  # bounds the number of frames in memory
                running.popleft().result()
        for one in running:
            one.result()
    for place in copies:
        pixels[place] = pixels[place - 1]
    return pixels


def _as_shown(frame: av.VideoFrame, size: tuple[int, int]) -> Pixels:
    """Returns the frame's pixels as players show them; ``size`` is what the model takes."""
    with refusing("the video's interlaced lines cannot be joined ({}); encode it again"):
        frame = deinterlaced(frame)
    return in_standard_range(frame, size) if has_high_range(frame) else _opaque(frame)


def _opaque(frame: av.VideoFrame) -> Pixels:
    """Returns the frame's pixels in RGB, transparent ones over white."""
    # A palette's alpha is often 0 where the colour is meant.
    has_alpha = any(part.is_alpha for part in frame.format.components)
    if not has_alpha or frame.format.name == "pal8":
        return np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8)
    return np.asarray(over(WHITE, Image.fromarray(frame.to_ndarray(format="rgba", threads=1))))


def _check_head(file: BinaryIO) -> bool:
    """Returns whether the file is an mp4 whose frames are cut off behind the index. Raises
    MediaError for an image, and for an mp4 without a whole index."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    if kind := image_kind(head):
        instead = _INSTEAD.get(kind, "send it as an image")
        raise MediaError(f"this is {kind}, not a video; {instead}")
    if head[4:8] != b"ftyp":
        return False
    size = file.seek(0, io.SEEK_END)
    offset = 0
    boxes = set[bytes]()
    while offset + 8 <= size:
        file.seek(offset)
        header = file.read(16)
        length, box = int.from_bytes(header[:4], "big"), header[4:8]
        if length == 1:
            length = int.from_bytes(header[8:16], "big")
        elif length == 0:  # up to the end of the file
            length = size - offset
        if length < 8 or offset + length > size:
            if box not in _OF_THE_VIDEO:  # what cameras write behind the last box
                break
            if (box == b"mdat" and b"moov" in boxes) or (box == b"moof" and box in boxes):
                return True
            raise MediaError(
                f"the mp4 is cut off or damaged: its {box.decode('latin-1')!r} box does not fit "
                f"into the {size:,} bytes of the file; send the whole file"
            )
        boxes.add(box)
        offset += length
    if not boxes & {b"moov", b"moof"}:
        raise MediaError("the mp4 is cut off: it has no index ('moov' box); send the whole file")
    return False


def _shown_track(container: av.container.InputContainer, limits: DecodeLimits) -> av.VideoStream:
    if (num_streams := len(container.streams)) > limits.max_streams:
        raise MediaError(
            f"the file has {num_streams} tracks; at most {limits.max_streams} are allowed: send "
            "the video's track alone"
        )
    tracks = [each for each in container.streams.video if not each.disposition & _NO_VIDEO]
    stream = max(tracks, key=_rank, default=None)
    if stream is None:
        kinds = sorted({stream.type for stream in container.streams})
        found = f" (only {', '.join(kinds)})" if kinds else ""
        raise MediaError(f"the file has no video track that can be read{found}")
    context = stream.codec_context
    if not _is_read(stream):
        name = f"{context.codec.canonical_name}, which is not read" if context else "unknown"
        raise MediaError(
            f"the video's codec is {name}; encode it again in one of {', '.join(CODECS)}"
        )
    limits.check_size(context.width, context.height, _FRAME)
    return stream


def _is_read(stream: av.VideoStream) -> bool:
    context = stream.codec_context  # None: FFmpeg does not know the codec
    return context is not None and context.codec.canonical_name in CODECS


def _rank(stream: av.VideoStream) -> tuple[bool, bool, int]:
    """Whether a track can be decoded, whether it is enabled (FFmpeg's mark of an enabled track of
    an mp4, and of the default of others), and its pixels."""
    if not _is_read(stream):
        return False, False, 0
    context = stream.codec_context
    is_enabled = bool(stream.disposition & av.stream.Disposition.default)
    return True, is_enabled, context.width * context.height
