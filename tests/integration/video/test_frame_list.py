"""Frames that a client sampled itself: decoded as the sampled frames of a video would be."""

from __future__ import annotations

import dataclasses
import io
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from PIL import Image

from hippo.errors import MediaError
from hippo.media.frame_list import MAGIC, pack_frames, read_frame_list
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.support.clips import refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives


def jpeg(level: int, *, width: int = 32, height: int = 24, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (level, level, level)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def listed(images: Sequence[bytes], fps: float = 2.0) -> Media:
    seconds = [number / fps for number in range(len(images))]
    return Media(MediaKind.VIDEO, pack_frames(images, seconds, end_s=len(images) / fps))


async def test_all_frames_are_looked_at_in_their_order(decoder: MediaDecoder) -> None:
    media = await decoder.decode(listed([jpeg(20 * n) for n in range(8)]), FramePlan(fps=0.5))
    assert media.frames.shape == (8, 24, 32, 3)
    assert [round(float(frame.float().mean()) / 20) for frame in media.frames] == list(range(8))
    assert media.frame_seconds == (0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5)
    assert media.sampled_fps == 2.0


async def test_an_odd_number_is_filled_up_with_the_last_frame(decoder: MediaDecoder) -> None:
    media = await decoder.decode(listed([jpeg(0), jpeg(100), jpeg(200)]), FramePlan())
    assert [round(float(frame.float().mean()), -1) for frame in media.frames] == [0, 100, 200, 200]
    assert media.frame_seconds == (0, 0.5, 1, 1)
    assert media.sampled_fps == 2.0
    one = await decoder.decode(listed([jpeg(50)]), FramePlan())
    assert len(one.frames) == 2


async def test_of_more_frames_than_asked_for_evenly_spaced_ones_are_taken(
    decoder: MediaDecoder,
) -> None:
    media = await decoder.decode(listed([jpeg(20 * n) for n in range(8)]), FramePlan(max_frames=4))
    assert [round(float(frame.float().mean()) / 20) for frame in media.frames] == [0, 2, 4, 6]
    assert media.frame_seconds == (0, 1, 2, 3)
    assert media.sampled_fps == 1.0


async def test_frames_of_a_part_of_a_clip_keep_its_times(decoder: MediaDecoder) -> None:
    seconds = [10, 11, 13, 14]
    part = Media(MediaKind.VIDEO, pack_frames([jpeg(9)] * 4, seconds, end_s=14 + 4 / 3))
    media = await decoder.decode(part, FramePlan())
    assert media.frame_seconds == (10, 11, 13, 14)
    assert media.sampled_fps == pytest.approx(3 / 4)
    late = pack_frames([jpeg(9)] * 4, [90_000.0 + second for second in seconds], end_s=90_016)
    media = await decoder.decode(Media(MediaKind.VIDEO, late), FramePlan())  # of a long clip
    assert media.frame_seconds[0] == 90_010


async def test_a_broken_frame_is_named(decoder: MediaDecoder) -> None:
    good = jpeg(90)
    message = await refusal(decoder, listed([good, good, good[: len(good) // 2]]))
    assert message.startswith("frame 2 of the video is damaged or cut off")
    message = await refusal(decoder, listed([good, b"text", good]))
    assert message == "frame 1 of the video is not a jpeg image that can be read"
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    assert "frame 0 of the video is not a jpeg" in await refusal(
        decoder, listed([buffer.getvalue()])
    )


async def test_frames_of_different_sizes_are_refused(decoder: MediaDecoder) -> None:
    message = await refusal(decoder, listed([jpeg(1), jpeg(2), jpeg(3, width=40)]))
    assert message == (
        "frame 2 of the video has 40 x 24 pixels, frame 0 has 32 x 24; all must be of one size"
    )


async def test_the_limits_of_videos_hold(decoder: MediaDecoder) -> None:
    message = await refusal(decoder, listed([jpeg(1)] * 65))
    assert message == "the video has 65 frames; at most 64 are allowed: send fewer"
    message = await refusal(decoder, listed([jpeg(1), jpeg(1, width=2048, height=1024)]))
    assert "frame 1 of the video has 2048 x 1024 pixels" in message
    message = await refusal(decoder, listed([jpeg(1)] * 13, fps=0.1))
    assert "the video lasts 130.0 s; at most 120 s are allowed" in message
    limits = dataclasses.replace(decoder.limits, max_memory_bytes=64 << 20)
    async with MediaDecoder(limits) as small:
        message = await refusal(small, listed([jpeg(1, width=1024, height=1000)] * 22))
        assert "22 frames of 1024 x 1000 pixels need 67,584,000 bytes" in message


async def test_a_list_that_contradicts_itself_is_refused() -> None:
    whole = pack_frames([b"one", b"two"], [0.0, 1.0], end_s=2.0)
    listed_frames = read_frame_list(io.BytesIO(whole), len(whole))
    assert [whole[start : start + size] for start, size in listed_frames.spans] == [b"one", b"two"]
    for data, words in [
        (whole[:10], "cut off"),
        (whole[:40], "cut off"),
        (whole[:-1], "says that it has"),
        (whole + b"x", "says that it has"),
        (MAGIC + struct.pack("<dI", 1.0, 0), "has 0 frames"),
        (MAGIC + struct.pack("<dI", 1.0, 2**32 - 1), "4294967295 frames"),
        (pack_frames([b"1", b"2"], [0.0, 0.0], end_s=2.0), "ascend"),
        (pack_frames([b"1", b"2"], [-1.0, 2.0], end_s=3.0), "ascend"),
        (pack_frames([b"1", b"2"], [1.0, 2.0], end_s=2.0), "ascend"),
        (pack_frames([b"1", b"2"], [1e9, 1e9 + 1], end_s=1e9 + 2), "later than a day"),
        (pack_frames([b"1"], [0.0], end_s=float("nan")), "ascend"),
        (pack_frames([b"1"], [0.0], end_s=float("inf")), "ascend"),
        (pack_frames([b"1", b"2"], [0.0, float("nan")], end_s=2.0), "ascend"),
    ]:
        with pytest.raises(MediaError, match=words):
            read_frame_list(io.BytesIO(data), len(data))
