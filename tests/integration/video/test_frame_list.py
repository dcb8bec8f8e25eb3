"""Frames that a client sampled itself: decoded as the sampled frames of a video would be."""

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
from tests.fuzz.corpus import picture
from tests.support.clips import refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives


def jpeg(level: int, *, width: int = 32, height: int = 24, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (level, level, level)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def listed(images: Sequence[bytes], fps: float = 2.0) -> Media:
    seconds = [number / fps for number in range(len(images))]
    return Media(MediaKind.VIDEO, pack_frames(images, seconds, end_s=len(images) / fps))


@pytest.mark.parametrize(
    ("levels", "plan", "shown", "seconds"),
    [
        (
            range(0, 160, 20),
            FramePlan(fps=0.5),
            range(0, 160, 20),
            (0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5),
        ),
        # An odd number is filled up with the last frame.
        ([0, 100, 200], FramePlan(), [0, 100, 200, 200], (0, 0.5, 1, 1)),
        ([60], FramePlan(), [60, 60], (0, 0)),
        # Of more frames than asked for evenly spaced ones are taken.
        (range(0, 160, 20), FramePlan(max_frames=4), [0, 40, 80, 120], (0, 1, 2, 3)),
    ],
)
async def test_all_frames_are_looked_at_in_their_order(
    decoder: MediaDecoder,
    levels: Sequence[int],
    plan: FramePlan,
    shown: Sequence[int],
    seconds: tuple[float, ...],
) -> None:
    media = await decoder.decode(listed([jpeg(level) for level in levels]), plan)
    assert media.frames.shape == (len(shown), 24, 32, 3)
    assert [20 * round(float(frame.float().mean()) / 20) for frame in media.frames] == list(shown)
    assert media.frame_seconds == seconds
    assert media.sampled_fps == (1.0 if plan.max_frames else 2.0)


async def test_frames_of_a_part_of_a_clip_keep_its_times(decoder: MediaDecoder) -> None:
    seconds = [10, 11, 13, 14]
    part = Media(MediaKind.VIDEO, pack_frames([jpeg(9)] * 4, seconds, end_s=14 + 4 / 3))
    media = await decoder.decode(part, FramePlan())
    assert media.frame_seconds == (10, 11, 13, 14)
    assert media.sampled_fps == pytest.approx(3 / 4)
    late = pack_frames([jpeg(9)] * 4, [90_000.0 + second for second in seconds], end_s=90_016)
    media = await decoder.decode(Media(MediaKind.VIDEO, late), FramePlan())  # of a long clip
    assert media.frame_seconds[0] == 90_010


GOOD = jpeg(90)


@pytest.mark.parametrize(
    ("images", "fps", "words"),
    [
        ([GOOD, GOOD, GOOD[: len(GOOD) // 2]], 2, "frame 2 of the video is damaged or cut off"),
        ([GOOD, b"text", GOOD], 2, "frame 1 of the video is not a jpeg image that can be read"),
        ([picture("PNG")], 2, "frame 0 of the video is not a jpeg"),
        (
            [GOOD, GOOD, jpeg(3, width=40)],
            2,
            "frame 2 of the video has 40 x 24 pixels, frame 0 has 32 x 24; all must be of one size",
        ),
        ([GOOD] * 65, 2, "the video has 65 frames; at most 64 are allowed: send fewer"),
        ([GOOD, jpeg(1, width=2048, height=1024)], 2, "frame 1 of the video has 2048 x 1024 pixel"),
        ([GOOD] * 13, 0.1, "the video lasts 130.0 s; at most 120 s are allowed"),
    ],
)
async def test_a_frame_that_is_wrong_is_named(
    decoder: MediaDecoder, images: list[bytes], fps: float, words: str
) -> None:
    assert (await refusal(decoder, listed(images, fps))).startswith(words)


async def test_their_memory_is_limited(decoder: MediaDecoder) -> None:
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
