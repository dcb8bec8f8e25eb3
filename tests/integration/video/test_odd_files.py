"""Odd files through the real decoder: each with its frames, or the error that it must become."""

from __future__ import annotations

import os
from typing import Any

import av
import pytest

from hippo.errors import MediaError
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import IMAGES, VIDEOS, encode, patched, picture, sound_only, without

# Two frames a second of a clip of eight frames in two seconds, 64 x 32, unless it stands here.
SHAPES: dict[str, tuple[int, int, int]] = {
    "mp4 with frames that refer to later ones": (8, 32, 64),
    "mpeg-ts, interlaced": (4, 32, 64),
    "webm av1": (4, 64, 64),
    "mkv ffv1 of an odd size": (4, 17, 33),
    "mkv raw": (4, 16, 16),
    "variable frame rate": (8, 32, 64),
    "rotated by 90": (4, 64, 32),
    "one frame": (2, 32, 64),
    "frames one by one": (4, 24, 32),
}


def built(build: Any) -> bytes:
    try:
        return bytes(build())
    except av.codec.codec.UnknownCodecError as error:
        pytest.skip(f"this build of FFmpeg has no {error}")


@pytest.mark.parametrize("name", VIDEOS)
async def test_an_odd_video_is_decoded(decoder: MediaDecoder, name: str) -> None:
    data = built(VIDEOS[name])
    media = await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan())
    assert tuple(media.frames.shape) == (*SHAPES.get(name, (4, 32, 64)), 3)
    assert list(media.frame_seconds) == sorted(media.frame_seconds)
    assert 0.1 < media.sampled_fps <= 25
    if name not in ("frames one by one", "one frame"):
        levels = [float(frame.float().mean()) for frame in media.frames]
        assert levels == sorted(levels)  # it grows brighter
        assert levels[-1] > levels[0]


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="needs Linux' scheduler")
def test_an_encoder_leaves_the_priority_of_this_process_alone() -> None:
    before = os.sched_getscheduler(0)
    built(VIDEOS["webm av1"])
    assert os.sched_getscheduler(0) == before


@pytest.mark.parametrize("name", IMAGES)
async def test_an_odd_image_is_decoded(decoder: MediaDecoder, name: str) -> None:
    media = await decoder.decode(Media(MediaKind.IMAGE, IMAGES[name]()), FramePlan())
    assert tuple(media.frames.shape) == (1, 24, 40, 3)


REFUSED = {
    "nothing": (lambda: b"", "is empty"),
    "a text": (lambda: b"WEBVTT\n\n00:00.000 --> 00:01.000\nHi\n", "not a video that can be read"),
    "sound in a video's container": (sound_only, "no video track that can be read (only audio)"),
    "a wave file": (lambda: b"RIFF\x24\0\0\0WAVEfmt " + bytes(24), "not a video"),
    "a picture": (lambda: picture("PNG"), "this is a PNG image"),
    "a web picture": (lambda: picture("WEBP"), "not a video that can be read"),
    "an mp4 without its index": (
        lambda: without(encode("mp4", "libx264"), b"moov"),
        "it has no index",
    ),
    "an mp4 without its pictures": (
        lambda: without(
            encode("mp4", "libx264", container_options={"movflags": "faststart"}), b"mdat"
        ),
        "",
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


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_decoded_is_refused_with_its_reason(
    decoder: MediaDecoder, name: str
) -> None:
    build, words = REFUSED[name]
    pid = decoder.worker_pid
    with pytest.raises(MediaError) as caught:
        await decoder.decode(Media(MediaKind.VIDEO, built(build)), FramePlan())
    assert words in caught.value.message
    assert decoder.worker_pid == pid  # and nothing died of it


@pytest.mark.parametrize("container", ["matroska", "mpegts", "avi", "flv"])
async def test_of_a_truncated_stream_what_is_there_is_decoded(
    decoder: MediaDecoder, container: str
) -> None:
    codec = {"matroska": "libx264", "mpegts": "mpeg2video", "avi": "mpeg4", "flv": "flv1"}
    data = encode(container, codec[container], num_frames=50, fps=25)
    media = await decoder.decode(Media(MediaKind.VIDEO, data[: len(data) * 2 // 3]), FramePlan())
    assert 2 <= len(media.frames) <= 4


async def test_the_content_counts_and_not_what_a_file_is_called(decoder: MediaDecoder) -> None:
    for name in ("webm vp8", "avi mpeg4", "mkv ffv1 of an odd size", "gif"):
        data = built(VIDEOS[name])
        await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan())
        with pytest.raises(MediaError):
            if name == "gif":  # which is an image, too
                data = data[:40]
            await decoder.decode(Media(MediaKind.IMAGE, data), FramePlan())
