"""Colours that a file means, sizes that change, and videos as stored or as shown."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest

from hippo.errors import MediaError
from hippo.media.resizing import FrameLimits
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import Pixels, encode

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives

# Of AVCOL_SPC: the shares of red and blue in the luma.
MATRICES = {"bt709": (1, 0.2126, 0.0722), "bt601": (5, 0.299, 0.114), "bt2020": (9, 0.2627, 0.0593)}
VALUES = [(120, 100, 160), (60, 180, 110)]


def constant(values: tuple[int, int, int], matrix: int, color_range: int) -> bytes:
    """A clip whose pixels all have one Y, U and V."""

    def paint(_: int, width: int, height: int) -> av.VideoFrame:
        frame = av.VideoFrame(width, height, "yuv420p")
        for plane, value in zip(frame.planes, values, strict=True):
            plane.update(bytes([value]) * plane.buffer_size)
        frame.colorspace, frame.color_range = matrix, color_range
        return frame

    context = {"colorspace": matrix, "color_range": color_range}
    lossless = {"qp": "0"}
    return encode("mp4", "libx264", num_frames=4, options=lossless, context=context, paint=paint)


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
    data = constant(values, matrix, color_range)
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
    time: dict[str, Any] = {"fps": fps, "num_frames": 2 * fps}
    small = encode(container, codec, paint=paint(60), **time)
    large = encode(container, codec, paint=paint(180), width=128, height=64, **time)
    for joined, size, levels in (
        (small + large, (32, 64), (60, 180)),
        (large + small, (64, 128), (180, 60)),
    ):
        media = await decoder.decode(Media(MediaKind.VIDEO, joined), FramePlan(num_frames=4))
        assert tuple(media.frames.shape) == (4, *size, 3)
        found = [float(frame.float().mean()) for frame in media.frames]
        assert found == pytest.approx([levels[0]] * 2 + [levels[1]] * 2, abs=6)


HEVC = {"crf": "4", "preset": "ultrafast", "x265-params": "log-level=none:pools=none"}
NITS = (0, 5, 50, 100, 203, 1000)


def encoded(
    codec: str, frames: list[av.VideoFrame], options: dict[str, str], aspect: Fraction | None = None
) -> bytes:
    names = ("color_primaries", "color_trc", "colorspace", "color_range")
    context: dict[str, Any] = {name: getattr(frames[0], name) for name in names}
    if aspect is not None:
        context["sample_aspect_ratio"] = aspect
    size: dict[str, Any] = {"fps": 10, "width": frames[0].width, "height": frames[0].height}
    size |= {"num_frames": len(frames), "pix_fmt": frames[0].format.name}
    return encode(
        "mp4", codec, options=options, context=context, paint=lambda n, *_: frames[n], **size
    )


def pq(nits: float) -> float:
    """The signal of a brightness, by SMPTE ST 2084."""
    power = (nits / 10_000) ** (2610 / 16_384)
    c1, c2, c3 = 3424 / 4096, 2413 / 128, 2392 / 128
    return float(((c1 + c2 * power) / (1 + c3 * power)) ** (2523 / 32))


def grey_steps(transfer: int, signals: list[float]) -> list[av.VideoFrame]:
    """Four frames in 10 bits, of steps of 32 pixels."""
    luma = np.repeat(np.array([round(64 + 876 * each) for each in signals], np.uint16), 32)
    frame = av.VideoFrame(len(luma), 64, "yuv420p10le")
    for number, plane in enumerate(frame.planes):
        values = np.full(plane.line_size // 2, 512, np.uint16)
        if number == 0:
            values[: len(luma)] = luma
        plane.update(values.tobytes() * plane.height)
    frame.color_primaries = frame.colorspace = 9  # BT.2020
    frame.color_trc, frame.color_range = transfer, 1
    return [frame] * 4


async def first(decoder: MediaDecoder, data: bytes, *, as_shown: bool = True) -> Any:
    """The first frame's pixels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "frame_limits", FrameLimits(as_shown=as_shown))
        media = await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan())
    return media.frames.numpy()[0]


async def test_pq_is_as_bright_as_it_is_meant_up_to_diffuse_white(decoder: MediaDecoder) -> None:
    data = encoded("libx265", grey_steps(16, [pq(nits) for nits in NITS]), HEVC)
    stored = await first(decoder, data, as_shown=False)
    assert stored[32, 16::32].max() < 200  # grey
    shown = (await first(decoder, data))[32, 16::32].astype(int)
    # A display of standard range has a gamma of 2.4 (BT.1886).
    expected = [255 * min(nits / 203, 1) ** (1 / 2.4) for nits in NITS]
    assert np.abs(shown - np.array(expected)[:, None]).max() <= 4


async def test_hlg_reaches_white_at_its_reference_white(decoder: MediaDecoder) -> None:
    data = encoded("libx265", grey_steps(18, [0.0, 0.38, 0.75, 1.0]), HEVC)
    black, grey, white, brightest = (await first(decoder, data))[32, 16::32, 0].astype(int)
    assert black == 0 and brightest == 255 and white >= 250
    # 18 % grey has 38 % of the signal, 26 cd/m² (BT.2408).
    assert grey == pytest.approx(255 * (26 / 203) ** (1 / 2.4), abs=4)


async def test_standard_range_is_the_same_either_way(decoder: MediaDecoder) -> None:
    frames = []
    for number in range(4):
        pixels = np.full((64, 96, 3), (60 * number, 120, 255 - 60 * number), np.uint8)
        frames.append(av.VideoFrame.from_ndarray(pixels).reformat(format="yuv420p"))
    data = encoded("libx264", frames, {"crf": "4"})
    stored = await first(decoder, data, as_shown=False)
    assert np.array_equal(stored, await first(decoder, data))


def combed(width: int = 192, height: int = 96) -> list[av.VideoFrame]:
    """A bar that moves to the right between the two fields of each frame."""
    frames = []
    for number in range(6):
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[0::2, 20 + number * 16 : 60 + number * 16] = 220
        pixels[1::2, 28 + number * 16 : 68 + number * 16] = 220
        frames.append(av.VideoFrame.from_ndarray(pixels).reformat(format="yuv420p"))
    return frames


async def test_interlaced_video_has_the_lines_of_one_time(decoder: MediaDecoder) -> None:
    data = encoded("libx264", combed(), {"crf": "4", "x264-params": "interlaced=1:tff=1"})
    stored, shown = [
        (await first(decoder, data, as_shown=each))[:, :, 0].astype(int) for each in (False, True)
    ]
    assert np.abs(np.diff(stored, axis=0)).mean() > 10
    assert np.abs(np.diff(shown, axis=0)).mean() < 1
    ends = np.flatnonzero(shown[48] > 110)[[0, -1]]
    assert np.abs(np.array([(20, 59), (28, 67)]) - ends).max(axis=1).min() <= 2  # of one field


@pytest.mark.parametrize(
    ("aspect", "size"),
    [(Fraction(16, 11), (96, 279)), (Fraction(1, 2), (192, 192)), (None, (96, 192))],
)
async def test_anamorphic_video_has_square_pixels(
    decoder: MediaDecoder, aspect: Fraction | None, size: tuple[int, int]
) -> None:
    data = encoded("libx264", combed(), {"crf": "20"}, aspect)
    assert (await first(decoder, data, as_shown=False)).shape[:2] == (96, 192)
    assert (await first(decoder, data)).shape[:2] == size


async def test_an_aspect_that_is_far_off_is_refused(decoder: MediaDecoder) -> None:
    data = encoded("libx264", combed(), {"crf": "20"}, Fraction(60, 1))
    with pytest.raises(MediaError, match="has 11520 x 96 pixels; at most 1,048,576 are allowed"):
        await first(decoder, data)
