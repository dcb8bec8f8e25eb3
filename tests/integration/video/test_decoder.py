"""What comes out of real files and odd recordings: the right frames, upright, at their times."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import encode, remuxed
from tests.support.clips import image, numbers, picture, refusal, video

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives


async def test_a_video_gives_the_planned_frames_at_their_times(decoder: MediaDecoder) -> None:
    media = await decoder.decode(video(32, fps=8), FramePlan())
    assert media.kind is MediaKind.VIDEO
    assert media.frames.dtype == torch.uint8
    assert media.frames.shape == (8, 64, 64, 3)
    assert numbers(media) == [0, 4, 8, 12, 0, 4, 8, 12]
    assert media.frame_seconds == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
    assert media.sampled_fps == 2.0 and media.notes == ()


@pytest.mark.parametrize("container", ["avi", "h264"])
async def test_frames_without_stored_times_are_counted(
    decoder: MediaDecoder, container: str
) -> None:
    codec = "libx264" if container == "h264" else "mpeg4"
    data = video(50, fps=25, container=container, codec=codec, options={"bf": "2", "b": "4000000"})
    media = await decoder.decode(data, FramePlan())
    assert numbers(media) == [0, 12, 25 % 16, 37 % 16]
    assert media.frame_seconds == pytest.approx((0.0, 0.48, 1.0, 1.48))


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


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "turned"])
async def test_an_image_gives_one_frame(decoder: MediaDecoder, kind: str) -> None:
    is_turned = kind == "turned"
    exif = Image.Exif()
    exif[0x0112] = 6  # shown a quarter turn clockwise
    data = image("JPEG", exif=exif) if is_turned else image(kind)
    media = await decoder.decode(data, FramePlan())
    assert media.kind is MediaKind.IMAGE and media.frame_seconds == (0.0,)
    assert media.frames.shape == ((1, 40, 20, 3) if is_turned else (1, 20, 40, 3))
    red, green, _ = media.frames[0, 1, -2 if is_turned else 0].tolist()
    assert red > 180 > 60 > green


def clip(container: str, codec: str, *, first: int = 0, num_frames: int = 8, **more: Any) -> bytes:
    """Frames that show ``first`` and so on, four a second."""

    def paint(number: int, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return picture(first + number, width, height)

    size: dict[str, Any] = {"width": 64, "height": 64, "num_frames": num_frames}
    return encode(container, codec, paint=paint, **size, **more)


def long_mp4(movflags: str) -> bytes:
    options, flags = {"g": "8", "bf": "0"}, {"movflags": movflags}
    return clip("mp4", "libx264", num_frames=64, options=options, container_options=flags)


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mpegts", "libx264", {"g": "4", "bf": "0"}),
        ("mpegts", "libx264", {"bf": "2"}),  # frames out of order
        ("webm", "libvpx-vp9", {"deadline": "realtime"}),
    ],
)
async def test_a_clock_that_starts_again_goes_on(
    decoder: MediaDecoder, container: str, codec: str, options: dict[str, str]
) -> None:
    joined = b"".join(clip(container, codec, first=first, options=options) for first in (0, 8))
    media = await decoder.decode(Media(MediaKind.VIDEO, joined), FramePlan(fps=4.0))
    assert numbers(media) == list(range(16))
    expected = [number / 4 for number in range(16)]
    assert list(media.frame_seconds) == pytest.approx(expected, abs=0.13)
    media = await decoder.decode(Media(MediaKind.VIDEO, joined), FramePlan(num_frames=4))
    assert numbers(media) == [0, 4, 8, 12]


async def test_a_clock_that_jumps_forward_goes_on(decoder: MediaDecoder) -> None:
    def jump(number: int, packet: Any) -> bool:
        if number >= 8:
            packet.pts += round(3600 / packet.time_base)
            packet.dts += round(3600 / packet.time_base)
        return True

    plain = clip("mpegts", "libx264", num_frames=16, options={"g": "8", "bf": "0"})
    data = remuxed(plain, "mpegts", jump)
    media = await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan(fps=4.0))
    assert numbers(media) == list(range(16))
    assert media.frame_seconds[-1] == pytest.approx(15 / 4, abs=0.05)


async def test_a_slide_that_stays_for_a_minute_is_no_jump(decoder: MediaDecoder) -> None:
    ticks = [*(250 * number for number in range(8)), 60_000]
    data = clip("matroska", "libx264", num_frames=9, ticks=ticks)
    media = await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan(num_frames=8))
    assert media.frame_seconds[-1] < 60 and numbers(media)[1:] == [7] * 7


@pytest.mark.parametrize("num_missing", [4, 12, 32])
async def test_what_comes_before_the_first_key_frame_is_left_out(
    decoder: MediaDecoder, num_missing: int
) -> None:
    options = {"g": str(num_missing + 1), "bf": "0", "sc_threshold": "0"}
    num_frames = num_missing + 9
    plain = clip("mpegts", "libx264", num_frames=num_frames, options=options)
    data = remuxed(plain, "mpegts", lambda number, _: number >= 1)
    media = await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan(fps=4.0))
    shown = range(num_missing + 1, num_frames)
    assert numbers(media) == [number % 16 for number in shown]
    assert media.frame_seconds[0] == 0.0
    (note,) = media.notes
    assert f"the first {num_missing / 4:.1f} s of the video cannot be decoded" in note


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
async def test_of_a_file_that_is_cut_off_behind_its_index_half_is_enough(
    decoder: MediaDecoder, share: float
) -> None:
    data = long_mp4("faststart")
    start = data.index(b"mdat")
    media = Media(MediaKind.VIDEO, data[: start + int((len(data) - start) * share)])
    if share < 0.5:
        message = await refusal(decoder, media)
        assert "of its 64 frames are there; send the whole file" in message
        return
    found = await decoder.decode(media, FramePlan(fps=4.0))
    shown = numbers(found)
    assert shown == [number % 16 for number in range(len(shown))] and len(shown) >= 32
    (note,) = found.notes
    assert "the file is cut off behind" in note and "of its 64 frames" in note


@pytest.mark.parametrize(("box", "num_bytes"), [(b"mdat", 40), (b"moof", 30)])
async def test_fragments_that_are_cut_off_are_used_and_it_is_said(
    decoder: MediaDecoder, box: bytes, num_bytes: int
) -> None:
    data = long_mp4("frag_keyframe+empty_moov")
    media = Media(MediaKind.VIDEO, data[: data.rindex(box) + num_bytes])
    found = await decoder.decode(media, FramePlan(fps=4.0))
    shown = numbers(found)
    assert 56 <= len(shown) < 64 and shown == [number % 16 for number in range(len(shown))]
    assert found.notes == ("the file is cut off; what is there is used",)
