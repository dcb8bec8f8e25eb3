"""Pictures as people see them: orientation, transparency, depth, and the track of players."""

import io
import struct
import zlib
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import Pixels, encode, with_matrix, with_palette, written
from tests.support.clips import numbers, picture, video

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives


async def decoded(
    decoder: MediaDecoder, data: bytes, kind: MediaKind = MediaKind.VIDEO, **plan: Any
) -> Pixels:
    media = await decoder.decode(Media(kind, data), FramePlan(**plan))
    return media.frames.numpy()


def corners(number: int, width: int, height: int) -> Pixels:
    """A red, a green and a blue quarter, and a white one: no two orientations are the same."""
    pixels = np.full((height, width, 3), 255, np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[: height // 2, width // 2 :] = (0, 160, 0)
    pixels[height // 2 :, : width // 2] = (0, 0, 255)
    return pixels


ORIENTATIONS = {  # of tkhd: (a, b, c, d), as ffmpeg shows it
    (1, 0, 0, 1): lambda x: x,
    (-1, 0, 0, 1): np.fliplr,
    (1, 0, 0, -1): np.flipud,
    (-1, 0, 0, -1): lambda x: np.rot90(x, 2),
    (0, 1, -1, 0): lambda x: np.rot90(x, -1),
    (0, -1, 1, 0): lambda x: np.rot90(x, 1),
    (0, 1, 1, 0): lambda x: x.transpose(1, 0, 2),
    (0, -1, -1, 0): lambda x: np.rot90(x, 2).transpose(1, 0, 2),
}


@pytest.fixture(scope="module")
def cornered() -> bytes:
    return encode("mp4", "libx264", paint=corners, width=96, height=64)


@pytest.mark.parametrize("matrix", ORIENTATIONS)
async def test_a_video_is_shown_in_each_of_the_eight_orientations(
    decoder: MediaDecoder, cornered: bytes, matrix: tuple[int, int, int, int]
) -> None:
    plain = await decoded(decoder, cornered)
    found = await decoded(decoder, with_matrix(cornered, *matrix))
    assert np.abs(found[0].astype(int) - ORIENTATIONS[matrix](plain[0])).max() <= 8


@pytest.mark.parametrize(("container", "turns"), [("matroska", 1), ("matroska", 2), ("mov", 3)])
async def test_the_rotation_of_any_container_counts(
    decoder: MediaDecoder, container: str, turns: int
) -> None:
    plain = encode(container, "libx264", paint=corners)
    turned = encode(container, "libx264", paint=corners, rotation=90 * turns)
    expected = np.rot90((await decoded(decoder, plain))[0], turns)
    found = (await decoded(decoder, turned))[0]
    assert np.abs(found.astype(int) - expected).max() <= 8


def png_of_16_bits(colour_type: int, pixels: Any, transparent: tuple[int, ...] = ()) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    rows = np.asarray(pixels, ">u2")
    header = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 16, colour_type, 0, 0, 0)
    key = struct.pack(f">{len(transparent)}H", *transparent)
    chunks = chunk(b"IHDR", header) + (chunk(b"tRNS", key) if transparent else b"")
    chunks += chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + chunks + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def filled(*columns: tuple[float, ...]) -> Any:
    """An image of 56 x 56 pixels with these values in columns of equal width."""
    return np.repeat(np.array(columns), 56 // len(columns), axis=0)[None].repeat(56, axis=0)


def figure(mode: str, kind: str) -> bytes:
    """A black figure on the left, and nothing on the right."""
    image = Image.fromarray(filled((0, 0, 0, 255), (0, 0, 0, 0)).astype(np.uint8), "RGBA")
    if mode == "P":
        palette = Image.fromarray(filled((0,), (1,)).astype(np.uint8)[..., 0], "P")
        palette.putpalette([0, 0, 0, 0, 0, 0])
        return saved(palette, kind, transparency=1)
    if mode in ("L", "RGB"):
        grey = Image.fromarray(filled((9,), (0,)).astype(np.uint8)[..., 0], "L").convert(mode)
        return saved(grey, kind, transparency=0 if mode == "L" else (0, 0, 0))
    return saved(image.convert(mode), kind, lossless=True)


FIGURES = {
    "rgba png": figure("RGBA", "PNG"),
    "grey png": figure("LA", "PNG"),
    "palette png": figure("P", "PNG"),
    "grey png, one colour": figure("L", "PNG"),
    "rgb png, one colour": figure("RGB", "PNG"),
    "webp": figure("RGBA", "WEBP"),
    "gif": figure("P", "GIF"),
    "16-bit rgba": png_of_16_bits(6, filled((9, 9, 9, 65535), (0, 0, 0, 0))),
    "16-bit grey": png_of_16_bits(4, filled((9, 65535), (0, 0))),
    "16-bit grey, one value": png_of_16_bits(0, filled((2000,), (300,)), (300,)),
    "16-bit rgb, one colour": png_of_16_bits(
        2, filled((0, 0, 0), (300, 600, 900)), (300, 600, 900)
    ),
}


@pytest.mark.parametrize("name", FIGURES)
async def test_what_is_transparent_shows_the_background(decoder: MediaDecoder, name: str) -> None:
    for background, expected in ((0, (255, 255, 255)), (1 + 0x0A141E, (10, 20, 30))):
        found = await decoded(decoder, FIGURES[name], MediaKind.IMAGE, background=background)
        assert found[0, 10, 10].max() < 16
        assert tuple(found[0, 10, -10]) == expected


async def test_half_transparent_pixels_are_mixed(decoder: MediaDecoder) -> None:
    data = saved(Image.new("RGBA", (56, 56), (200, 0, 100, 102)), "PNG")
    (pixels,) = await decoded(decoder, data, MediaKind.IMAGE)
    expected = [round(value * 0.4 + 255 * 0.6) for value in (200, 0, 100)]
    assert np.abs(pixels[5, 5] - np.array(expected)).max() <= 1


async def test_a_transparent_video_lies_on_white(decoder: MediaDecoder) -> None:
    def paint(_: int, width: int, height: int) -> Pixels:
        pixels = np.zeros((height, width, 4), np.uint8)
        pixels[:, : width // 2, 3] = 255
        return pixels

    pixels = await decoded(decoder, encode("mov", "png", pix_fmt="rgba", paint=paint))
    assert pixels[0, 10, 5].max() == 0 and pixels[0, 10, -5].min() == 255


def tiff(kind: type[np.generic], *columns: float) -> bytes:
    values = filled(*((value,) for value in columns)).astype(kind)
    return saved(Image.fromarray(values[..., 0]), "TIFF")


DEEP = {
    "16-bit grey": png_of_16_bits(0, filled((0,), (32768,), (40000,), (65535,))),
    "tiff of floats": tiff(np.float32, 0.0, 0.5, 0.61, 1.0),
    "tiff of large floats": tiff(np.float32, -5.0, 0.0, 1.1, 5.0),
    "tiff of 16 bits": tiff(np.uint16, 0, 32768, 40000, 65535),
    "tiff of 32 bits": tiff(np.int32, 0, 50, 61, 100),
}


@pytest.mark.parametrize("name", DEEP)
async def test_more_than_eight_bits_are_scaled(decoder: MediaDecoder, name: str) -> None:
    (pixels,) = await decoded(decoder, DEEP[name], MediaKind.IMAGE)
    found = [int(pixels[20, column].mean()) for column in (6, 20, 34, 48)]
    assert np.abs(np.array(found) - (0, 128, 156, 255)).max() <= 1


def two_tracks(*sizes: tuple[int, int], default: int | None) -> bytes:
    """An mkv whose tracks have these sizes."""

    def fill(output: Any) -> None:
        streams = []
        for number, (width, height) in enumerate(sizes):
            stream = output.add_stream("libx264", rate=4)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.disposition = av.stream.Disposition(int(number == default))
            streams.append(stream)
        for number in range(8):
            for stream in streams:
                pixels = picture(number, stream.width, stream.height)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        for stream in streams:
            output.mux(stream.encode())

    return written("matroska", fill)


@pytest.mark.parametrize(
    ("sizes", "default", "expected"),
    [
        (((64, 32), (128, 64)), None, (64, 128)),
        (((64, 32), (128, 64)), 0, (32, 64)),
        (((128, 64), (64, 32)), 1, (32, 64)),
        (((64, 64), (64, 64)), None, (64, 64)),
    ],
)
async def test_the_track_is_the_one_that_players_show(
    decoder: MediaDecoder, sizes: Any, default: int | None, expected: tuple[int, int]
) -> None:
    found = await decoded(decoder, two_tracks(*sizes, default=default), fps=2.0)
    assert found.shape[1:3] == expected


async def test_a_palette_that_comes_with_the_first_packet_lasts(decoder: MediaDecoder) -> None:
    found = await decoded(decoder, with_palette())
    assert [tuple(frame[5, 5]) for frame in found] == [(100 + 2 * i, 40, 0) for i in range(8)]


@pytest.mark.parametrize("tail", [bytes(100), b"SEFT" * 9, b"\0\0\1\0SEFH" + bytes(20)])
async def test_bytes_behind_the_last_box_are_no_damage(decoder: MediaDecoder, tail: bytes) -> None:
    media = Media(MediaKind.VIDEO, video(fps=4).data + tail)
    assert numbers(await decoder.decode(media, FramePlan())) == list(range(0, 16, 2))


async def test_a_header_that_lies_about_the_duration_counts_for_nothing(
    decoder: MediaDecoder,
) -> None:
    data = video(fps=4).data
    place = data.index(b"mvhd") + 4 + 12
    scale = int.from_bytes(data[place : place + 4], "big")
    lying = data[: place + 4] + struct.pack(">I", 86_400 * scale) + data[place + 8 :]
    media = await decoder.decode(Media(MediaKind.VIDEO, lying), FramePlan())
    assert numbers(media) == list(range(0, 16, 2))
