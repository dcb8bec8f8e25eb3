"""Media that cannot be decoded: each kind with its own message, and nothing hangs."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import pytest

from hippo.errors import MediaError
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from hippo.video.limits import DecodeLimits

MakeVideo = Callable[..., bytes]
MakeImage = Callable[..., bytes]


async def refusal(decoder: MediaDecoder, data: bytes, kind: MediaKind = MediaKind.VIDEO) -> str:
    with pytest.raises(MediaError) as caught:
        await decoder.decode(Media(kind, data), FramePlan())
    assert caught.value.http_status == 400
    return caught.value.message


@pytest.mark.parametrize(
    "data", [b"hello, this is text" * 50, bytes(5000), b"\x00", b"%PDF-1.7\n" * 99]
)
async def test_what_is_not_a_video_is_refused(decoder: MediaDecoder, data: bytes) -> None:
    message = await refusal(decoder, data)
    assert message.startswith("this is not a video that can be read; send mp4,")


async def test_a_playlist_that_names_other_files_is_refused(decoder: MediaDecoder) -> None:
    for data in (
        b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile '/etc/passwd'\n",
    ):
        assert "not a video that can be read" in await refusal(decoder, data)


async def test_an_empty_file_is_refused(decoder: MediaDecoder) -> None:
    assert await refusal(decoder, b"") == "the video is empty (0 bytes)"
    assert await refusal(decoder, b"", MediaKind.IMAGE) == "the image is empty (0 bytes)"


async def test_an_image_sent_as_a_video_is_refused(
    decoder: MediaDecoder, make_image: MakeImage
) -> None:
    for kind in ("PNG", "JPEG"):
        message = await refusal(decoder, make_image(kind))
        assert message == f"this is a {kind} image, not a video; send it as an image"


async def test_a_video_sent_as_an_image_is_refused(
    decoder: MediaDecoder, make_video: MakeVideo
) -> None:
    message = await refusal(decoder, make_video(), MediaKind.IMAGE)
    assert message == "this is not an image that can be read; send a jpeg, png or webp"


async def test_a_damaged_image_is_refused(decoder: MediaDecoder, make_image: MakeImage) -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        data = make_image(kind, width=400, height=300)
        message = await refusal(decoder, data[: len(data) // 2], MediaKind.IMAGE)
        assert "image" in message and ("cut off" in message or "cannot be read" in message), kind


async def test_sound_without_pictures_is_refused(
    decoder: MediaDecoder, make_video: MakeVideo
) -> None:
    message = await refusal(decoder, make_video(0, has_audio=True))
    assert message == "the file has no video track that can be read (only audio)"


async def test_a_video_without_frames_is_refused(
    decoder: MediaDecoder, make_video: MakeVideo
) -> None:
    fragments = make_video(
        8, container_options={"movflags": "empty_moov+frag_keyframe+default_base_moof"}
    )
    header_only = fragments[: fragments.index(b"moof") - 4]
    assert await refusal(decoder, header_only + box(b"moof", b"")) == "the video has no frames"


def box(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", 8 + len(content)) + name + content


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("options", [{}, {"movflags": "faststart"}])
async def test_a_truncated_mp4_is_refused(
    decoder: MediaDecoder, make_video: MakeVideo, share: float, options: dict[str, str]
) -> None:
    data = make_video(64, container_options=options)
    message = await refusal(decoder, data[: int(len(data) * share)])
    assert "cut off" in message and "send the whole file" in message


async def test_noise_in_place_of_the_pictures_is_refused(
    decoder: MediaDecoder, make_video: MakeVideo
) -> None:
    data = bytearray(make_video(32, codec="mpeg4"))
    start = data.index(b"mdat") + 4
    end = data.index(b"moov") - 4
    data[start:end] = bytes((7 * i * i + 13) % 251 for i in range(end - start))
    message = await refusal(decoder, bytes(data))
    assert "damaged" in message


async def test_a_huge_resolution_in_the_header_is_refused(
    decoder: MediaDecoder, make_video: MakeVideo
) -> None:
    # mpeg4 without its own header: the container's numbers are what a decoder would allocate.
    data = bytearray(make_video(8, codec="mpeg4"))
    place = data.index(b"mp4v", data.index(b"stsd")) + 4 + 6 + 2 + 16
    data[place : place + 4] = struct.pack(">HH", 20_000, 20_000)
    esds = data.index(b"esds")
    data[esds : esds + 4] = b"free"
    message = await refusal(decoder, bytes(data))
    assert message == (
        "the size of a frame of the video cannot be read: it is damaged, or far above the "
        "1,048,576 pixels allowed"
    )


async def test_a_real_huge_frame_is_refused(decoder: MediaDecoder, make_video: MakeVideo) -> None:
    message = await refusal(decoder, make_video(2, width=2048, height=1024))
    assert "2048 x 1024 pixels; at most 1,048,576 are allowed" in message


async def test_a_huge_image_is_refused_before_it_is_decoded(
    decoder: MediaDecoder, make_image: MakeImage
) -> None:
    data = bytearray(make_image("PNG"))
    place = data.index(b"IHDR") + 4
    data[place : place + 8] = struct.pack(">II", 20_000, 20_000)
    header = bytes(data[place - 4 : place + 13])
    data[place + 13 : place + 17] = struct.pack(">I", zlib.crc32(header))
    message = await refusal(decoder, bytes(data), MediaKind.IMAGE)
    assert "the image has 20000 x 20000 pixels" in message


async def test_a_long_video_is_refused(decoder: MediaDecoder, make_video: MakeVideo) -> None:
    message = await refusal(decoder, make_video(150, fps=1))
    assert message == (
        "the video lasts 150.0 s; at most 120 s are allowed: send a shorter part of it"
    )


async def test_too_many_bytes_are_refused(decoder: MediaDecoder) -> None:
    message = await refusal(decoder, bytes((4 << 20) + 1))
    assert message.startswith("the video has 4,194,305 bytes; at most 4,194,304 are allowed")


async def test_an_unknown_codec_is_refused(decoder: MediaDecoder, make_video: MakeVideo) -> None:
    data = make_video()
    message = await refusal(decoder, data.replace(b"avc1", b"zzz1").replace(b"avcC", b"zzzC"))
    assert "codec" in message and "h264" in message


async def test_frames_that_do_not_fit_into_memory_are_refused(make_video: MakeVideo) -> None:
    limits = DecodeLimits(max_memory_bytes=64 << 20)
    data = make_video(64, fps=2, width=640, height=640)
    async with MediaDecoder(limits) as decoder:
        message = await refusal(decoder, data)
        assert "64 frames of 640 x 640 pixels need 78,643,200 bytes" in message
        assert "ask for fewer frames" in message


async def test_a_decoder_that_needs_too_much_memory_is_stopped_and_replaced(
    make_video: MakeVideo,
) -> None:
    large = make_video(4, width=4096, height=4096, codec="mpeg4")
    async with MediaDecoder(DecodeLimits(max_memory_bytes=200 << 20)) as decoder:
        pid = decoder.worker_pid
        message = await refusal(decoder, large)
        assert message.startswith("decoding the video needs more than the 200 MiB of memory")
        assert decoder.worker_pid != pid
        media = await decoder.decode(Media(MediaKind.VIDEO, make_video(8)), FramePlan())
        assert len(media.frames) == 4


async def test_after_every_kind_of_bad_media_the_same_worker_goes_on(
    decoder: MediaDecoder, make_video: MakeVideo
) -> None:
    pid = decoder.worker_pid
    for data in (b"", b"text", make_video()[:500], make_video(0, has_audio=True)):
        await refusal(decoder, data)
    media = await decoder.decode(Media(MediaKind.VIDEO, make_video(16)), FramePlan())
    assert len(media.frames) == 4
    assert decoder.worker_pid == pid
