"""Colours are those that the file means, and frames of another size are fitted into the first's."""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
import pytest

from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import Pixels, encode

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives

# Of AVCOL_SPC: the shares of red and blue in the luma.
MATRICES = {"bt709": (1, 0.2126, 0.0722), "bt601": (5, 0.299, 0.114), "bt2020": (9, 0.2627, 0.0593)}
VALUES = [(120, 100, 160), (60, 180, 110), (200, 128, 128), (90, 90, 90)]


def constant(values: tuple[int, int, int], matrix: int, color_range: int, name: str) -> bytes:
    """A clip whose pixels all have one Y, U and V."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=4, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 32, name
        stream.codec_context.colorspace = matrix
        stream.codec_context.color_range = color_range
        for number in range(4):
            frame = av.VideoFrame(64, 32, name)
            for plane, value in zip(frame.planes, values, strict=True):
                plane.update(bytes([value]) * plane.buffer_size)
            frame.colorspace, frame.color_range = matrix, color_range
            frame.pts, frame.time_base = number, Fraction(1, 4)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def in_rgb(values: tuple[int, int, int], red: float, blue: float, *, is_full: bool) -> list[float]:
    """By ITU-R BT.601's equations with other shares."""
    y, u, v = values
    luma = y / 255 if is_full else (y - 16) / 219
    scale = 255 if is_full else 224
    of_red = luma + (v - 128) / scale * 2 * (1 - red)
    of_blue = luma + (u - 128) / scale * 2 * (1 - blue)
    of_green = (luma - red * of_red - blue * of_blue) / (1 - red - blue)
    return [255 * min(max(each, 0), 1) for each in (of_red, of_green, of_blue)]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("color_range", [1, 2], ids=["limited", "full"])
@pytest.mark.parametrize("name", MATRICES)
async def test_matrix_and_range_are_the_files(
    decoder: MediaDecoder, name: str, color_range: int, values: tuple[int, int, int]
) -> None:
    matrix, red, blue = MATRICES[name]
    data = constant(values, matrix, color_range, "yuv420p")
    media = await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan())
    expected = in_rgb(values, red, blue, is_full=color_range == 2)
    assert media.frames[1, 16, 32].tolist() == pytest.approx(expected, abs=3)


@pytest.mark.parametrize(
    ("container", "codec"), [("mpegts", "libx264"), ("h264", "libx264"), ("mpegts", "mpeg2video")]
)
async def test_frames_of_another_size_are_fitted_into_the_firsts(
    decoder: MediaDecoder, container: str, codec: str
) -> None:
    def paint(level: int) -> Callable[[int, int, int], Pixels]:
        return lambda _, width, height: np.full((height, width, 3), level, np.uint8)

    fps = 25 if codec == "mpeg2video" else 4
    small = encode(container, codec, fps=fps, num_frames=2 * fps, paint=paint(60))
    large = encode(
        container, codec, fps=fps, num_frames=2 * fps, width=128, height=64, paint=paint(180)
    )
    for joined, size, levels in (
        (small + large, (32, 64), (60, 180)),
        (large + small, (64, 128), (180, 60)),
    ):
        media = await decoder.decode(Media(MediaKind.VIDEO, joined), FramePlan(num_frames=4))
        assert tuple(media.frames.shape) == (4, *size, 3)
        found = [float(frame.float().mean()) for frame in media.frames]
        assert found == pytest.approx([levels[0]] * 2 + [levels[1]] * 2, abs=6)
