"""Odd files through the real decoder: each with its frames, or the error that it must become."""

import gzip
import io
import struct
import zlib

import av
import pytest
from PIL import Image

from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import (
    FASTSTART,
    IMAGES,
    VIDEOS,
    Build,
    encode,
    patched,
    picture,
    sound_only,
    without,
)
from tests.support.clips import refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives

# Two frames a second of a clip of eight frames in two seconds, 64 x 32, unless it stands here.
SHAPES: dict[str, tuple[int, int, int]] = {
    "mp4 with frames that refer to later ones": (8, 32, 64),
    "mpeg-ts, interlaced": (4, 32, 64),
    "webm av1": (4, 64, 64),
    "mkv ffv1 of an odd size": (4, 17, 33),
    "mkv raw": (4, 16, 16),
    "variable frame rate": (8, 32, 64),
    "rotated by 90": (4, 64, 32),
    "transport streams joined": (8, 32, 64),
    "webm joined": (8, 32, 64),
    "avi of a palette": (8, 32, 64),
    "one frame": (2, 32, 64),
    "frames one by one": (4, 24, 32),
}


def built(build: Build) -> bytes:
    try:
        return build()
    except av.codec.codec.UnknownCodecError as error:
        pytest.skip(f"this build of FFmpeg has no {error}")


@pytest.mark.parametrize("name", VIDEOS)
async def test_an_odd_video_is_decoded(decoder: MediaDecoder, name: str) -> None:
    data = built(VIDEOS[name])
    media = await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan())
    assert tuple(media.frames.shape) == (*SHAPES.get(name, (4, 32, 64)), 3)
    assert list(media.frame_seconds) == sorted(media.frame_seconds)
    assert 0.1 < media.sampled_fps <= 25
    levels = [float(frame.float().mean()) for frame in media.frames]
    if "joined" in name:
        assert levels[:4] == pytest.approx(levels[4:], abs=8)
    elif name not in ("frames one by one", "one frame"):
        assert levels == sorted(levels) and levels[-1] > levels[0]  # it grows brighter


@pytest.mark.parametrize("name", IMAGES)
async def test_an_odd_image_is_decoded(decoder: MediaDecoder, name: str) -> None:
    media = await decoder.decode(Media(MediaKind.IMAGE, IMAGES[name]()), FramePlan())
    assert tuple(media.frames.shape) == (1, 24, 40, 3)


def without_frames() -> bytes:
    """An mp4 that begins as one in fragments does, and has none."""
    movflags = {"movflags": "empty_moov+frag_keyframe+default_base_moof"}
    fragments = encode("mp4", "libx264", container_options=movflags)
    return fragments[: fragments.index(b"moof") - 4] + struct.pack(">I", 8) + b"moof"


def noise_for_pictures() -> bytes:
    data = encode("mp4", "mpeg4", num_frames=32)
    start, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    noise = bytes((7 * i * i + 13) % 251 for i in range(end - start))
    return data[:start] + noise + data[end:]


def huge_by_its_header() -> bytes:
    """Without mpeg4's own header: the container's numbers are what a decoder would allocate."""
    data = patched(encode("mp4", "mpeg4"), b"esds", 0, b"free")
    place = data.index(b"mp4v", data.index(b"stsd")) + 4 + 6 + 2 + 16
    return data[:place] + struct.pack(">HH", 20_000, 20_000) + data[place + 4 :]


def huge_png() -> bytes:
    data = patched(picture("PNG"), b"IHDR", 4, struct.pack(">II", 20_000, 20_000))
    header = data[data.index(b"IHDR") :][:17]
    return patched(data, b"IHDR", 17, struct.pack(">I", zlib.crc32(header)))


def animated_webp() -> bytes:
    first, *others = (Image.new("RGB", (32, 24), (80 * number, 9, 9)) for number in range(3))
    buffer = io.BytesIO()
    first.save(buffer, "WEBP", save_all=True, append_images=others)
    return buffer.getvalue()


REFUSED: dict[str, tuple[Build, str]] = {
    "nothing": (lambda: b"", "the video is empty (0 bytes)"),
    "a text": (lambda: b"WEBVTT\n\n00:00.000 --> 00:01.000\n", "not a video that can be read; s"),
    "zeros": (lambda: bytes(5000), "not a video that can be read"),
    "a document": (lambda: b"%PDF-1.7\n" * 99, "this is a PDF document, not a video that can"),
    "half a webm": (lambda: VIDEOS["webm vp8"]()[:100], "WebM video that is damaged or cut off"),
    "comments without end": (lambda: b"<!---->" * 73, "not a video that can be read"),
    "a page": (lambda: b"\n<!doctype HTML><p>404", "this is an HTML page, not a video that can"),
    "a gzip file": (lambda: gzip.compress(b"x" * 99), "this is a gzip file, not a video"),
    "a playlist": (
        lambda: b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "not a video that can be read",
    ),
    "a list of files": (lambda: b"ffconcat version 1.0\nfile '/etc/passwd'\n", "not a video that"),
    "sound in a video's container": (sound_only, "no video track that can be read (only audio)"),
    "a wave file": (lambda: b"RIFF\x24\0\0\0WAVEfmt " + bytes(24), "this is a WAV sound"),
    "a picture": (lambda: picture("PNG"), "this is a PNG image, not a video; send it as an image"),
    "a photo": (lambda: picture("JPEG"), "this is a JPEG image"),
    "a web picture": (lambda: picture("WEBP"), "this is a WebP image, not a video; send it as an"),
    "a moving web picture": (animated_webp, "an animated WebP, not a video; send it as mp4, webm"),
    "a phone's photo": (lambda: b"\0\0\0\x24ftypheic" + bytes(99), "this is a HEIC image"),
    "an mp4 without its index": (lambda: without(VIDEOS["mp4 h264"](), b"moov"), "it has no index"),
    "an mp4 without its pictures": (
        lambda: without(encode("mp4", "libx264", container_options=FASTSTART), b"mdat"),
        "",
    ),
    "an mp4 without frames": (without_frames, "the video has no frames"),
    "an mp4 of noise": (noise_for_pictures, "damaged"),
    "an mp4 that says it is huge": (huge_by_its_header, "or far above the 1,048,576 pixels"),
    "an mp4 of an unknown codec": (
        lambda: VIDEOS["mp4 h264"]().replace(b"avc1", b"zzz1").replace(b"avcC", b"zzzC"),
        "the video's codec is unknown; encode it again in one of h264,",
    ),
    "an avi that says it is huge": (
        lambda: patched(encode("avi", "rawvideo"), b"strf", 12, b"\xff\xff\0\0\xff\xff\0\0"),
        "pixels",
    ),
    "colours of a kind that is none": (
        lambda: patched(encode("mov", "prores_ks", pix_fmt="yuv422p10le"), b"icpf", 20, b"\xff"),
        "the video's colours cannot be converted",
    ),
    "a list of frames cut off": (lambda: VIDEOS["frames one by one"]()[:-5], "send it whole"),
}
REFUSED_IMAGES: dict[str, tuple[Build, str]] = {
    "nothing": (lambda: b"", "the image is empty (0 bytes)"),
    "a video": (VIDEOS["mp4 h264"], "this is a video, not an image; send it as a video"),
    "a phone's photo": (lambda: b"\0\0\0\x24ftypheic" + bytes(99), "this is a HEIC image, not an"),
    "a text": (lambda: b"no picture", "this is not an image that can be read; send a jpeg"),
    "half a png": (lambda: half("PNG"), "the image is damaged or cut off"),
    "half a jpeg": (lambda: half("JPEG"), "the image is damaged or cut off"),
    "half a webp": (lambda: half("WEBP"), "image"),
    "a png that says it is huge": (huge_png, "the image has 20000 x 20000 pixels"),
}


def half(kind: str) -> bytes:
    data = picture(kind, width=400, height=300)
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((MediaKind.VIDEO, name) for name in REFUSED),
        *((MediaKind.IMAGE, name) for name in REFUSED_IMAGES),
    ],
)
async def test_what_cannot_be_decoded_is_refused_with_its_reason(
    decoder: MediaDecoder, kind: MediaKind, name: str
) -> None:
    build, words = (REFUSED if kind is MediaKind.VIDEO else REFUSED_IMAGES)[name]
    assert words in await refusal(decoder, Media(kind, built(build)))


@pytest.mark.parametrize(
    ("share", "options"),
    [*((share, {}) for share in (0.02, 0.3, 0.6, 0.95)), (0.02, FASTSTART), (0.3, FASTSTART)],
)
async def test_an_mp4_without_its_whole_index_is_refused(
    decoder: MediaDecoder, share: float, options: dict[str, str]
) -> None:
    data = encode("mp4", "libx264", num_frames=64, container_options=options)
    message = await refusal(decoder, Media(MediaKind.VIDEO, data[: int(len(data) * share)]))
    assert "cut off" in message and "send the whole file" in message


@pytest.mark.parametrize(
    ("container", "codec"),
    [("matroska", "libx264"), ("mpegts", "mpeg2video"), ("avi", "mpeg4"), ("flv", "flv1")],
)
async def test_of_a_truncated_stream_what_is_there_is_decoded(
    decoder: MediaDecoder, container: str, codec: str
) -> None:
    data = encode(container, codec, num_frames=50, fps=25)
    media = await decoder.decode(Media(MediaKind.VIDEO, data[: len(data) * 2 // 3]), FramePlan())
    assert 2 <= len(media.frames) <= 4
