"""Odd media files, made here with PyAV and Pillow: what the decoder meets in the wild, in small.

They are the seeds of the media fuzzing, and each has its expected answer in
tests/integration/video/test_odd_files.py.
"""

import functools
import io
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.video.stream import VideoStream
from PIL import Image

from hippo.media.frame_list import pack_frames
from hippo.types import MediaKind

Build = Callable[[], bytes]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def encode(
    container: str,
    codec: str,
    *,
    num_frames: int = 8,
    fps: Fraction | int = 4,
    width: int = 64,
    height: int = 32,
    pix_fmt: str = "yuv420p",
    ticks: Sequence[int] | None = None,
    rotation: int = 0,
    num_audio: int = 0,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
    context: Mapping[str, Any] | None = None,
    paint: Callable[[int, int, int], Pixels | av.VideoFrame] | None = None,
) -> bytes:
    """A clip that grows brighter; ``ticks`` are frame times in thousandths of a second, ``context``
    is further attributes of the codec's.

    ``paint`` gives other frames (RGB) by number, width and height. Not less than 64 wide with
    libx265, which then writes beyond its own buffers.
    """

    def painted(number: int) -> av.VideoFrame:
        if paint is not None:
            pixels = paint(number, width, height)
            if isinstance(pixels, av.VideoFrame):
                return pixels
        else:
            pixels = np.full((height, width, 4), 20 + number * 200 // num_frames, np.uint8)
            pixels[: height // 2, :, 3] = 255
        layout = "rgb24" if pixels.shape[2] == 3 else "rgba"
        return av.VideoFrame.from_ndarray(pixels, format=layout)

    def fill(output: Any) -> None:
        output.metadata.update(metadata or {})
        stream = cast("VideoStream", output.add_stream(codec, rate=fps, options=options or {}))
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        for name, value in (context or {}).items():
            setattr(stream.codec_context, name, value)
        if ticks is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        sounds = [_sound(output) for _ in range(num_audio)]
        for number in range(num_frames):
            frame = painted(number)
            if ticks is not None:
                frame.pts, frame.time_base = ticks[number], Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        for sound in sounds:
            _silence(output, sound)

    return written(container, fill, container_options)


def encode_av1() -> bytes:
    """An AV1 clip, in a thread of its own: as root, SVT-AV1 gives the thread that calls it the
    scheduler's highest real-time priority, and every process started there would inherit it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(encode, "webm", "libsvtav1", width=64, height=64).result()


def _silence(output: Any, stream: Any) -> None:
    samples = np.zeros((1, 1600), dtype=np.int16)
    frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
    frame.rate = 8000
    output.mux(stream.encode(frame))
    output.mux(stream.encode())


def written(
    container: str, fill: Callable[[Any], None], options: dict[str, str] | None = None
) -> bytes:
    """A file with what ``fill`` muxes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "clip")
        with av.open(path, "w", format=container, container_options=options) as output:
            fill(output)
        return path.read_bytes()


def _sound(output: Any) -> Any:
    return output.add_stream("pcm_s16le", rate=8000, layout="mono")


def sound_only() -> bytes:
    """An mkv with sound and no picture."""
    return written("matroska", lambda output: _silence(output, _sound(output)))


def picture(
    kind: str, mode: str = "RGB", *, width: int = 40, height: int = 24, **options: Any
) -> bytes:
    """A still image of random-looking pixels."""
    num_channels = {"RGBA": 4, "RGB": 3, "CMYK": 3}.get(mode, 1)
    values = (np.arange(height * width * num_channels) * 37 % 251).astype(np.uint8)
    shape = (height, width, num_channels) if num_channels > 1 else (height, width)
    image = Image.fromarray(values.reshape(shape)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def patched(data: bytes, mark: bytes, offset: int, piece: bytes) -> bytes:
    """``data`` with ``piece`` put ``offset`` bytes after the first ``mark``."""
    start = data.index(mark) + offset
    return data[:start] + piece + data[start + len(piece) :]


def without(data: bytes, name: bytes) -> bytes:
    """An mp4 or avi without its top-level box or chunk ``name``, the rest as it is."""
    if data[:4] == b"RIFF":
        start = data.index(name)
        size = struct.unpack("<I", data[start + 4 : start + 8])[0]
        return data[:start] + data[start + 8 + size + size % 2 :]
    start = data.index(name) - 4
    size = struct.unpack(">I", data[start : start + 4])[0]
    return data[:start] + data[start + size :]


def with_matrix(data: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """An mp4 or mov with another display matrix."""
    place = data.index(b"tkhd") + 4 + 40
    values = (a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return data[:place] + struct.pack(">9i", *values) + data[place + 36 :]


def with_palette() -> bytes:
    """An avi of 16 frames, each of one colour of a palette that comes with the first."""
    palette = np.zeros((256, 4), np.uint8)  # alpha, red, green, blue
    palette[:, 0], palette[:, 1], palette[:, 2] = 255, np.arange(256), 40

    def paint(number: int, width: int, height: int) -> av.VideoFrame:
        both: Any = (np.full((height, width), 100 + number, np.uint8), palette)
        return av.VideoFrame.from_ndarray(both, format="pal8")

    return encode("avi", "rawvideo", num_frames=16, pix_fmt="pal8", paint=paint)


def remuxed(data: bytes, container: str, change: Callable[[int, Any], bool]) -> bytes:
    """The packets that ``change``, which may change their times, wants."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(file, "w", format=container) as output:
        stream = source.streams.video[0]
        copied = output.add_stream_from_template(stream)
        for number, packet in enumerate(source.demux(stream)):
            if packet.dts is not None and change(number, packet):
                packet.stream = copied
                output.mux(packet)
    return file.getvalue()


def between_keys() -> bytes:
    """A transport stream whose first key frame is missing."""
    whole = encode("mpegts", "libx264", num_frames=16, options={"g": "8", "bf": "0"})
    return remuxed(whole, "mpegts", lambda number, _: number > 0)


def frame_list(num_frames: int = 4) -> bytes:
    """JPEG frames as one file."""
    images = [picture("JPEG", width=32) for _ in range(num_frames)]
    seconds = [float(number) for number in range(num_frames)]
    return pack_frames(images, seconds, end_s=float(num_frames))


def clip(*kind: Any, **options: Any) -> Build:
    return functools.partial(encode, *kind, **options)


def image(*kind: Any, **options: Any) -> Build:
    return functools.partial(picture, *kind, **options)


FASTSTART = {"movflags": "faststart"}
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}
FAST = {"deadline": "realtime"}
X265 = {"x265-params": "log-level=none"}
PQ = "colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc"
VIDEOS: dict[str, Build] = {
    "mp4 h264": clip("mp4", "libx264"),
    "mp4 h264 with the index first": clip("mp4", "libx264", container_options=FASTSTART),
    "mp4 in fragments": clip("mp4", "libx264", container_options=FRAGMENTS),
    "mp4 with frames that refer to later ones": clip(
        "mp4", "libx264", num_frames=16, options={"bf": "3", "g": "8"}
    ),
    "mp4 mpeg4": clip("mp4", "mpeg4"),
    "mp4 hevc": clip("mp4", "libx265", options=X265),
    "mov prores": clip("mov", "prores_ks", pix_fmt="yuv422p10le"),
    "mov png with alpha": clip("mov", "png", pix_fmt="rgba"),
    "mov with 10 bits": clip("mov", "libx264", pix_fmt="yuv420p10le"),
    "webm vp8": clip("webm", "libvpx", options=FAST),
    "webm vp9": clip("webm", "libvpx-vp9", options=FAST),
    "webm vp9 with alpha": clip("webm", "libvpx-vp9", pix_fmt="yuva420p", options=FAST),
    "webm av1": encode_av1,
    "mkv ffv1 of an odd size": clip("matroska", "ffv1", width=33, height=17, pix_fmt="yuv444p"),
    "mkv without cues": clip("matroska", "libx264", container_options={"live": "1"}),
    "avi huffyuv": clip("avi", "huffyuv", pix_fmt="yuv422p"),
    "mkv raw": clip("matroska", "rawvideo", width=16, height=16, pix_fmt="yuv420p"),
    "mkv with sound": clip("matroska", "libx264", num_audio=2),
    "avi mpeg4": clip("avi", "mpeg4"),
    "avi mjpeg": clip("avi", "mjpeg", pix_fmt="yuvj420p"),
    "avi without an index": lambda: without(encode("avi", "mpeg4"), b"idx1"),
    "avi of 0 fps": lambda: zero_fps(encode("avi", "mpeg4")),
    "mpeg-ts h264": clip("mpegts", "libx264"),
    "mpeg-ts, interlaced": clip("mpegts", "mpeg2video", fps=25, options={"flags": "+ildct+ilme"}),
    "mpeg program stream": clip("mpeg", "mpeg1video", fps=25),
    "flv": clip("flv", "flv1"),
    "wmv": clip("asf", "wmv2"),
    "ivf": clip("ivf", "libvpx", options=FAST),
    "h264 without a container": clip("h264", "libx264"),
    "hevc without a container": clip("hevc", "libx265", options=X265),
    "gif": clip("gif", "gif", pix_fmt="rgb8"),
    "variable frame rate": clip("mp4", "libx264", ticks=[0, 40, 80, 120, 1000, 1040, 3000, 3900]),
    "rotated by 90": clip("mp4", "libx264", rotation=90),
    "rotated by 180": clip("mp4", "libx264", rotation=180),
    "mirrored": lambda: with_matrix(encode("mp4", "libx264"), -1, 0, 0, 1),
    "transport streams joined": lambda: 2 * encode("mpegts", "libx264"),
    "webm joined": lambda: 2 * encode("webm", "libvpx", options=FAST),
    "avi of a palette": with_palette,
    "mpeg-ts that begins between key frames": between_keys,
    "mp4 with bytes behind its last box": lambda: encode("mp4", "libx264") + b"SEFT" * 9,
    "mp4 of PQ": clip("mp4", "libx264", pix_fmt="yuv420p10le", options={"x264-params": PQ}),
    "mp4, anamorphic": clip("mp4", "libx264", options={"aspect": "4:1"}),
    "one frame": clip("mp4", "libx264", num_frames=1),
    "a title in another encoding": lambda: encode(
        "matroska", "libx264", metadata={"title": "clip XXXX"}
    ).replace(b"clip XXXX", b"clip \xe9\xff\xfe\x80"),
    "frames one by one": frame_list,
}
"""Files that are decoded."""

IMAGES: dict[str, Build] = {
    "jpeg": image("JPEG"),
    "jpeg, progressive": image("JPEG", progressive=True),
    "jpeg, cmyk": image("JPEG", "CMYK"),
    "jpeg, grey": image("JPEG", "L"),
    "png with alpha": image("PNG", "RGBA"),
    "png of a palette": image("PNG", "P"),
    "png of one bit": image("PNG", "1"),
    "webp": image("WEBP"),
    "webp, lossless": image("WEBP", "RGBA", lossless=True),
    "gif": image("GIF", "P"),
    "bmp": image("BMP"),
    "png of 16 bits": image("PNG", "I;16"),
    "png with a transparent colour": image("PNG", transparency=(0, 37, 74)),
    "tiff of floats": image("TIFF", "F"),
    "avif": image("AVIF"),
    "webp, animated": image("WEBP", save_all=True, append_images=[Image.new("RGB", (40, 24))]),
}
"""Still images that are decoded."""


def zero_fps(avi: bytes) -> bytes:
    """An avi whose main and stream headers say 0 frames a second."""
    avi = patched(avi, b"avih", 8, bytes(4))  # microseconds a frame
    return patched(avi, b"strh", 8 + 24, bytes(4))  # rate


def seeds() -> list[tuple[MediaKind, str, bytes]]:
    """All of them; those that this build of FFmpeg cannot write are left out."""
    found = []
    for kind, builds in ((MediaKind.VIDEO, VIDEOS), (MediaKind.IMAGE, IMAGES)):
        for name, build in builds.items():
            try:
                found.append((kind, name, build()))
            except av.codec.codec.UnknownCodecError:
                continue
    return found
