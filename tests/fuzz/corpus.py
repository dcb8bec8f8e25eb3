"""Odd media files, made here with PyAV and Pillow: what the decoder meets in the wild, in small.

They are the seeds of the media fuzzing, and each has its expected answer in
tests/integration/video/test_odd_files.py.
"""

from __future__ import annotations

import io
import struct
import tempfile
from collections.abc import Callable, Sequence
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
    paint: Callable[[int, int, int], Pixels] | None = None,
) -> bytes:
    """A clip that grows brighter; ``ticks`` are frame times in thousandths of a second.

    ``paint`` gives other frames (RGB) by number, width and height. Not less than 64 wide with
    libx265, which then writes beyond its own buffers.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "clip")
        with av.open(path, "w", format=container, container_options=container_options) as output:
            output.metadata.update(metadata or {})
            stream = cast("VideoStream", output.add_stream(codec, rate=fps, options=options or {}))
            stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
            if ticks is not None:
                stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
            if rotation:
                stream.set_display_rotation(rotation)
            sounds = [
                output.add_stream("pcm_s16le", rate=8000, layout="mono") for _ in range(num_audio)
            ]
            for number in range(num_frames):
                if paint is not None:
                    pixels = paint(number, width, height)
                else:
                    pixels = np.full((height, width, 4), 20 + number * 200 // num_frames, np.uint8)
                    pixels[: height // 2, :, 3] = 255
                layout = "rgb24" if pixels.shape[2] == 3 else "rgba"
                frame = av.VideoFrame.from_ndarray(pixels, format=layout)
                if ticks is not None:
                    frame.pts, frame.time_base = ticks[number], Fraction(1, 1000)
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
            for sound in sounds:
                _silence(output, sound)
        return path.read_bytes()


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


def sound_only() -> bytes:
    """An mkv with sound and no picture."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "clip")
        with av.open(path, "w", format="matroska") as output:
            _silence(output, output.add_stream("pcm_s16le", rate=8000, layout="mono"))
        return path.read_bytes()


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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "clip")
        with av.open(path, "w", format="avi") as output:
            stream = output.add_stream("rawvideo", rate=4)
            stream.width, stream.height, stream.pix_fmt = 64, 32, "pal8"
            for number in range(16):
                indices = np.full((32, 64), 100 + number, np.uint8)
                both: Any = (indices, palette)
                frame = av.VideoFrame.from_ndarray(both, format="pal8")
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
        return path.read_bytes()


def between_keys() -> bytes:
    """A transport stream whose first key frame is missing."""
    whole = encode("mpegts", "libx264", num_frames=16, options={"g": "8", "bf": "0"})
    file = io.BytesIO()
    with av.open(io.BytesIO(whole), "r") as source, av.open(file, "w", format="mpegts") as output:
        copied = output.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.dts is not None and number:
                packet.stream = copied
                output.mux(packet)
    return file.getvalue()


def frame_list(num_frames: int = 4) -> bytes:
    """JPEG frames as one file."""
    images = [picture("JPEG", width=32) for _ in range(num_frames)]
    seconds = [float(number) for number in range(num_frames)]
    return pack_frames(images, seconds, end_s=float(num_frames))


VIDEOS: dict[str, Build] = {
    "mp4 h264": lambda: encode("mp4", "libx264"),
    "mp4 h264 with the index first": lambda: encode(
        "mp4", "libx264", container_options={"movflags": "faststart"}
    ),
    "mp4 in fragments": lambda: encode(
        "mp4", "libx264", container_options={"movflags": "frag_keyframe+empty_moov"}
    ),
    "mp4 with frames that refer to later ones": lambda: encode(
        "mp4", "libx264", num_frames=16, options={"bf": "3", "g": "8"}
    ),
    "mp4 mpeg4": lambda: encode("mp4", "mpeg4"),
    "mp4 hevc": lambda: encode("mp4", "libx265", options={"x265-params": "log-level=none"}),
    "mov prores": lambda: encode("mov", "prores_ks", pix_fmt="yuv422p10le"),
    "mov png with alpha": lambda: encode("mov", "png", pix_fmt="rgba"),
    "mov with 10 bits": lambda: encode("mov", "libx264", pix_fmt="yuv420p10le"),
    "webm vp8": lambda: encode("webm", "libvpx", options={"deadline": "realtime"}),
    "webm vp9": lambda: encode("webm", "libvpx-vp9", options={"deadline": "realtime"}),
    "webm vp9 with alpha": lambda: encode(
        "webm", "libvpx-vp9", pix_fmt="yuva420p", options={"deadline": "realtime"}
    ),
    "webm av1": encode_av1,
    "mkv ffv1 of an odd size": lambda: encode(
        "matroska", "ffv1", width=33, height=17, pix_fmt="yuv444p"
    ),
    "mkv without cues": lambda: encode("matroska", "libx264", container_options={"live": "1"}),
    "avi huffyuv": lambda: encode("avi", "huffyuv", pix_fmt="yuv422p"),
    "mkv raw": lambda: encode("matroska", "rawvideo", width=16, height=16, pix_fmt="yuv420p"),
    "mkv with sound": lambda: encode("matroska", "libx264", num_audio=2),
    "avi mpeg4": lambda: encode("avi", "mpeg4"),
    "avi mjpeg": lambda: encode("avi", "mjpeg", pix_fmt="yuvj420p"),
    "avi without an index": lambda: without(encode("avi", "mpeg4"), b"idx1"),
    "avi of 0 fps": lambda: zero_fps(encode("avi", "mpeg4")),
    "mpeg-ts h264": lambda: encode("mpegts", "libx264"),
    "mpeg-ts, interlaced": lambda: encode(
        "mpegts", "mpeg2video", fps=25, options={"flags": "+ildct+ilme"}
    ),
    "mpeg program stream": lambda: encode("mpeg", "mpeg1video", fps=25),
    "flv": lambda: encode("flv", "flv1"),
    "wmv": lambda: encode("asf", "wmv2"),
    "ivf": lambda: encode("ivf", "libvpx", options={"deadline": "realtime"}),
    "h264 without a container": lambda: encode("h264", "libx264"),
    "hevc without a container": lambda: encode(
        "hevc", "libx265", options={"x265-params": "log-level=none"}
    ),
    "gif": lambda: encode("gif", "gif", pix_fmt="rgb8"),
    "variable frame rate": lambda: encode(
        "mp4", "libx264", ticks=[0, 40, 80, 120, 1000, 1040, 3000, 3900]
    ),
    "rotated by 90": lambda: encode("mp4", "libx264", rotation=90),
    "rotated by 180": lambda: encode("mp4", "libx264", rotation=180),
    "mirrored": lambda: with_matrix(encode("mp4", "libx264"), -1, 0, 0, 1),
    "transport streams joined": lambda: 2 * encode("mpegts", "libx264"),
    "webm joined": lambda: 2 * encode("webm", "libvpx", options={"deadline": "realtime"}),
    "avi of a palette": with_palette,
    "mpeg-ts that begins between key frames": between_keys,
    "mp4 with bytes behind its last box": lambda: encode("mp4", "libx264") + b"SEFT" * 9,
    "mp4 of PQ": lambda: encode(
        "mp4",
        "libx264",
        pix_fmt="yuv420p10le",
        options={"x264-params": "colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc"},
    ),
    "mp4, anamorphic": lambda: encode("mp4", "libx264", options={"aspect": "4:1"}),
    "one frame": lambda: encode("mp4", "libx264", num_frames=1),
    "a title in another encoding": lambda: encode(
        "matroska", "libx264", metadata={"title": "clip XXXX"}
    ).replace(b"clip XXXX", b"clip \xe9\xff\xfe\x80"),
    "frames one by one": frame_list,
}
"""Files that are decoded."""

IMAGES: dict[str, Build] = {
    "jpeg": lambda: picture("JPEG"),
    "jpeg, progressive": lambda: picture("JPEG", progressive=True),
    "jpeg, cmyk": lambda: picture("JPEG", "CMYK"),
    "jpeg, grey": lambda: picture("JPEG", "L"),
    "png with alpha": lambda: picture("PNG", "RGBA"),
    "png of a palette": lambda: picture("PNG", "P"),
    "png of one bit": lambda: picture("PNG", "1"),
    "webp": lambda: picture("WEBP"),
    "webp, lossless": lambda: picture("WEBP", "RGBA", lossless=True),
    "gif": lambda: picture("GIF", "P"),
    "bmp": lambda: picture("BMP"),
    "png of 16 bits": lambda: picture("PNG", "I;16"),
    "png with a transparent colour": lambda: picture("PNG", transparency=(0, 37, 74)),
    "tiff of floats": lambda: picture("TIFF", "F"),
    "avif": lambda: picture("AVIF"),
    "webp, animated": lambda: picture(
        "WEBP", save_all=True, append_images=[Image.new("RGB", (40, 24))]
    ),
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
