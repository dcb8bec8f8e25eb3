"""Recordings whose clock starts again, that begin between key frames, or that end too early."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest

from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import encode
from tests.support.clips import numbers, picture, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives


def clip(container: str, codec: str, *, first: int = 0, num_frames: int = 8, **more: Any) -> bytes:
    """Frames that show ``first`` and so on, four a second."""

    def paint(number: int, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return picture(first + number, width, height)

    size: dict[str, Any] = {"width": 64, "height": 64, "num_frames": num_frames}
    return encode(container, codec, paint=paint, **size, **more)


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mpeg-ts h264": ("mpegts", "libx264", {"options": {"g": "4", "bf": "0"}}),
    "mpeg-ts h264 with frames out of order": ("mpegts", "libx264", {"options": {"bf": "2"}}),
    "webm vp9": ("webm", "libvpx-vp9", {"options": {"deadline": "realtime"}}),
}


@pytest.mark.parametrize("name", KINDS)
async def test_a_clock_that_starts_again_goes_on(decoder: MediaDecoder, name: str) -> None:
    container, codec, more = KINDS[name]
    joined = clip(container, codec, **more) + clip(container, codec, first=8, **more)
    media = await decoder.decode(Media(MediaKind.VIDEO, joined), FramePlan(fps=4.0))
    assert numbers(media) == list(range(16))
    expected = [number / 4 for number in range(16)]
    assert list(media.frame_seconds) == pytest.approx(expected, abs=0.13)
    media = await decoder.decode(Media(MediaKind.VIDEO, joined), FramePlan(num_frames=4))
    assert numbers(media) == [0, 4, 8, 12]


def remuxed(
    data: bytes, container: str, change: Callable[[int, Any], bool], **options: Any
) -> bytes:
    """The packets that ``change``, which may change their times, wants."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(file, "w", format=container) as output:
        stream = source.streams.video[0]
        copied = output.add_stream_from_template(stream)
        for number, packet in enumerate(source.demux(stream)):
            if packet.dts is not None and change(number, packet):
                packet.stream = copied
                output.mux(packet)
    return file.getvalue()


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


@pytest.mark.parametrize(("share", "num_frames"), [(0.6, 0), (0.9, 0), (0.3, None)])
async def test_of_a_file_that_is_cut_off_behind_its_index_half_is_enough(
    decoder: MediaDecoder, share: float, num_frames: int | None
) -> None:
    data = clip(
        "mp4",
        "libx264",
        num_frames=64,
        options={"g": "8", "bf": "0"},
        container_options={"movflags": "faststart"},
    )
    start = data.index(b"mdat")
    media = Media(MediaKind.VIDEO, data[: start + int((len(data) - start) * share)])
    if num_frames is None:
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
    data = clip(
        "mp4",
        "libx264",
        num_frames=64,
        options={"g": "8", "bf": "0"},
        container_options={"movflags": "frag_keyframe+empty_moov"},
    )
    data = data[: data.rindex(box) + num_bytes]
    found = await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan(fps=4.0))
    shown = numbers(found)
    assert 56 <= len(shown) < 64 and shown == [number % 16 for number in range(len(shown))]
    assert found.notes == ("the file is cut off; what is there is used",)


async def test_a_whole_file_has_no_notes(decoder: MediaDecoder) -> None:
    for container, codec, more in KINDS.values():
        data = clip(container, codec, **more)
        media = await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan(fps=4.0))
        assert media.notes == () and numbers(media) == list(range(8))
