"""Real media files, made with PyAV and Pillow."""

from __future__ import annotations

import io
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import pytest
from av.video.stream import VideoStream
from PIL import Image

from hippo.video.decoder import MediaDecoder
from hippo.video.limits import DecodeLimits

MakeVideo = Callable[..., bytes]
NUM_STEPS = 16


def picture(number: int, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A grey frame whose level tells ``number``, with a red top left corner."""
    level = 40 + 12 * (number % NUM_STEPS)
    pixels = np.full((height, width, 3), level, dtype=np.uint8)
    pixels[: height // 4, : width // 4] = (230, 20, 20)
    return pixels


def number_of(pixels: Any) -> int:
    """The ``number`` modulo NUM_STEPS that a decoded frame shows in its middle."""
    height, width, _ = pixels.shape
    middle = pixels[3 * height // 8 : 5 * height // 8, 3 * width // 8 : 5 * width // 8]
    return round((float(middle.float().mean()) - 40) / 12)


def make_video(
    num_frames: int = 16,
    *,
    fps: Fraction | int = 8,
    width: int = 64,
    height: int = 64,
    container: str = "mp4",
    codec: str = "libx264",
    ticks: Sequence[int] | None = None,
    rotation: int = 0,
    has_audio: bool = False,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> bytes:
    """A clip whose frame i shows ``picture(i)``; ``ticks`` are times in thousandths of a second."""
    with tempfile.TemporaryDirectory() as folder:  # moving the index opens the file again
        path = Path(folder, "clip")
        with av.open(path, "w", format=container, container_options=container_options) as output:
            audio = output.add_stream("aac", rate=8000, layout="mono") if has_audio else None
            if num_frames:
                stream = cast(
                    "VideoStream", output.add_stream(codec, rate=fps, options=options or {})
                )
                stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
                if ticks is not None:
                    stream.codec_context.time_base = Fraction(1, 1000)
                    stream.time_base = Fraction(1, 1000)
                if rotation:
                    stream.set_display_rotation(rotation)
                for number in range(num_frames):
                    frame = av.VideoFrame.from_ndarray(
                        picture(number, width, height), format="rgb24"
                    )
                    if ticks is not None:
                        frame.pts, frame.time_base = ticks[number], Fraction(1, 1000)
                    output.mux(stream.encode(frame))
                output.mux(stream.encode())
            if audio is not None:
                silence = av.AudioFrame.from_ndarray(
                    np.zeros((1, 8000), dtype=np.float32), format="fltp", layout="mono"
                )
                silence.rate = 8000
                output.mux(audio.encode(silence))
                output.mux(audio.encode())
        return path.read_bytes()


def make_image(kind: str, *, width: int = 40, height: int = 20, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(3, width, height)).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="session", name="make_video")
def make_video_fixture() -> MakeVideo:
    return make_video


@pytest.fixture(scope="session", name="make_image")
def make_image_fixture() -> Callable[..., bytes]:
    return make_image


@pytest.fixture(scope="session", name="number_of")
def number_of_fixture() -> Callable[[Any], int]:
    return number_of


@pytest.fixture
async def decoder() -> AsyncIterator[MediaDecoder]:
    """A decoder with small limits, so that tests can exceed them."""
    limits = DecodeLimits(
        max_frames=64,
        max_pixels=1 << 20,
        max_duration_s=120.0,
        max_bytes=4 << 20,
        timeout_s=100.0,
        max_memory_bytes=256 << 20,
    )
    async with MediaDecoder(limits) as decoder:
        yield decoder
