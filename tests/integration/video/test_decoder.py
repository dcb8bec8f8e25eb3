"""What comes out of real files: the right frames, upright, at their times."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from PIL import Image

from hippo.types import FramePlan, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.support.clips import image, numbers, video

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives


async def test_a_video_gives_the_planned_frames_at_their_times(decoder: MediaDecoder) -> None:
    media = await decoder.decode(video(32, fps=8), FramePlan())
    assert media.kind is MediaKind.VIDEO
    assert media.frames.dtype == torch.uint8
    assert media.frames.shape == (8, 64, 64, 3)
    assert numbers(media) == [0, 4, 8, 12, 0, 4, 8, 12]
    assert media.frame_seconds == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
    assert media.sampled_fps == 2.0


@pytest.mark.parametrize("container", ["avi", "h264"])
async def test_frames_without_stored_times_are_counted(
    decoder: MediaDecoder, container: str
) -> None:
    codec = "libx264" if container == "h264" else "mpeg4"
    data = video(50, fps=25, container=container, codec=codec, options={"bf": "2", "b": "4000000"})
    media = await decoder.decode(data, FramePlan())
    assert numbers(media) == [0, 12, 25 % 16, 37 % 16]
    assert media.frame_seconds == pytest.approx((0.0, 0.48, 1.0, 1.48))


async def test_odd_counts_are_sampled_evenly(decoder: MediaDecoder) -> None:
    media = await decoder.decode(video(7, fps=4), FramePlan(fps=4.0))
    assert media.frames.shape[0] == 6
    assert numbers(media) == [place * 7 // 6 for place in range(6)]
    three = await decoder.decode(video(3, fps=4), FramePlan())
    assert numbers(three) == [0, 1]


async def test_a_video_of_one_frame_gives_it_twice(decoder: MediaDecoder) -> None:
    media = await decoder.decode(video(1), FramePlan())
    assert numbers(media) == [0, 0]
    assert media.frame_seconds == (0.0, 0.0)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
async def test_a_variable_frame_rate_is_sampled_in_time(
    decoder: MediaDecoder, container: str
) -> None:
    ticks = [*range(0, 500, 50), 1000, 2000, 3000]  # 10 quick frames, then one a second
    data = video(13, fps=20, ticks=ticks, container=container)
    media = await decoder.decode(data, FramePlan(fps=1.0))
    expected = {0.0: 0, 0.45: 9, 1.0: 10, 2.0: 11, 3.0: 12}
    assert len(media.frames) in (2, 4)  # by how long the container lets the last frame last
    for seconds, number in zip(media.frame_seconds, numbers(media), strict=True):
        assert expected[round(seconds, 2)] == number
    assert set(numbers(media)) <= {0, 9, 10, 11, 12}


async def test_times_start_at_the_first_frame(decoder: MediaDecoder) -> None:
    data = video(8, fps=4, ticks=range(5000, 7000, 250))
    media = await decoder.decode(data, FramePlan())
    assert media.frame_seconds == pytest.approx((0.0, 0.5, 1.0, 1.5))
    assert numbers(media) == [0, 2, 4, 6]


async def test_a_fragmented_mp4_and_a_fractional_rate_are_read(decoder: MediaDecoder) -> None:
    data = video(
        60,
        fps=Fraction(30000, 1001),
        container_options={"movflags": "frag_keyframe+empty_moov"},
        options={"g": "10"},
    )
    media = await decoder.decode(data, FramePlan())
    assert numbers(media) == [0, 15, 30 % 16, 45 % 16]
    assert media.frame_seconds[1] == pytest.approx(15 * 1001 / 30000, abs=1e-3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
async def test_an_image_gives_one_frame(decoder: MediaDecoder, kind: str) -> None:
    media = await decoder.decode(image(kind), FramePlan())
    assert media.kind is MediaKind.IMAGE
    assert media.frames.shape == (1, 20, 40, 3)
    assert media.frame_seconds == (0.0,)
    assert int(media.frames[0, 0, 0, 0]) > 180 > 60 > int(media.frames[0, 0, 0, 1])


async def test_an_image_is_turned_as_its_orientation_says(decoder: MediaDecoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown a quarter turn clockwise
    data = image("JPEG", exif=exif)
    media = await decoder.decode(data, FramePlan())
    assert media.frames.shape == (1, 40, 20, 3)
    assert int(media.frames[0, 1, -2, 0]) > 180


async def test_frames_outlive_the_decoder_and_can_be_written() -> None:
    async with MediaDecoder() as decoder:
        media = await decoder.decode(video(16), FramePlan())
        other = await decoder.decode(video(16), FramePlan())
    media.frames.zero_()
    assert numbers(other) == [0, 4, 8, 12]
