"""Each limit of the decoder, with a file that was made to exceed it."""

import asyncio
import dataclasses
import os
import signal
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hippo.errors import MediaError
from hippo.media.formats import CODECS
from hippo.media.limits import DecodeLimits
from hippo.service.settings import EngineSettings
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import encode
from tests.support.clips import refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = DecodeLimits(max_memory_bytes=256 << 20, timeout_s=100.0)
# What the files of the tests have.
ENOUGH = dataclasses.replace(
    LIMITS, max_streams=9, max_stored_frames=120, max_stored_fps=1001, max_pixels=13_000
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large() -> AsyncIterator[MediaDecoder]:
    async with MediaDecoder(ENOUGH) as decoder:
        yield decoder


async def num_decoded(decoder: MediaDecoder, data: bytes) -> int:
    return len((await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan())).frames)


async def test_a_file_decodes_up_to_a_limit(large: MediaDecoder) -> None:
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"num_audio": 8}, "the file has 9 tracks; at most 8 are allowed: send the video's", 4),
        ({"num_frames": 120, "fps": 30}, "more than the 119 frames allowed", 8),
        ({"num_frames": 50, "fps": 1000}, "frames a second; at most 500 are allowed", 4),
        ({"width": 130, "height": 100}, "130 x 100 pixels; at most 12,999 are allowed", 4),
    ]
    less: Any = {"max_streams": 8, "max_stored_frames": 119, "max_stored_fps": 500}
    async with MediaDecoder(dataclasses.replace(ENOUGH, max_pixels=12_999, **less)) as small:
        for file, words, num_frames in cases:
            data = encode("matroska", "mpeg4", **file)
            assert words in await refusal(small, Media(MediaKind.VIDEO, data))
            assert await num_decoded(large, data) == num_frames


def gif_of(num_frames: int, width: int, height: int) -> bytes:
    """A large GIF of which each frame changes one pixel, two a second: 23 bytes a frame."""
    frame = (
        struct.pack("<BBBBHBB", 0x21, 0xF9, 4, 4, 50, 0, 0)
        + struct.pack("<BHHHHB", 0x2C, 0, 0, 1, 1, 0)
        + bytes((2, 2, 0x44, 1, 0))
    )
    screen = struct.pack("<6sHHBBB", b"GIF89a", width, height, 0x80, 0, 0) + bytes(6)
    return screen + num_frames * frame + b";"


async def test_the_cost_of_a_small_file_is_estimated_before_it_is_decoded() -> None:
    # 10 kB that would keep a worker at work for minutes: 13 gigapixels, all to be looked at.
    data = gif_of(400, 7680, 4320)
    assert len(data) < 10_000
    limits = dataclasses.replace(LIMITS, timeout_s=5.0)  # 139 s of one thread, of 16 at most
    async with MediaDecoder(limits) as decoder:
        pid = decoder.worker_pids[0]
        message = await refusal(decoder, Media(MediaKind.VIDEO, data))
        assert "400 frames of 7680 x 4320 pixels are to be decoded for the 400 that" in message
        assert "5 s are allowed: ask for fewer frames" in message
        assert decoder.worker_pids[0] == pid  # nothing was killed
        assert await num_decoded(decoder, gif_of(8, 64, 64)) == 8


@pytest.mark.parametrize("kind", list(MediaKind))
async def test_aspect(large: MediaDecoder, kind: MediaKind) -> None:
    name = "the image" if kind is MediaKind.IMAGE else "a frame of the video"
    message = await refusal(large, Media(kind, gif_of(2, 5, 1005)))
    assert message == f"{name} has 5 x 1005 pixels; one side may be at most 200 times the other"
    assert len((await large.decode(Media(kind, gif_of(2, 5, 1000)), FramePlan())).frames) >= 1


SEVERAL_SIZES = [{"num_frames": 4}, {"num_frames": 4, "width": 256, "height": 256}]


@pytest.mark.parametrize(
    ("container", "codec", "files", "words"),
    [
        ("avi", "asv1", [{}], "the video's codec is asv1, which is not read; encode it again in "),
        ("avi", "asv1", [{}], ", ".join(CODECS)),
        ("nut", "mpeg4", [{}], "not a video that can be read"),
        ("matroska", "mpeg4", [{"num_frames": 3, "ticks": [0, 1000, 20_000_000]}], "14400 s are a"),
        ("h264", "libx264", SEVERAL_SIZES, "256 x 256 pixels; at most 13,000 are allowed"),
    ],
)
async def test_what_no_service_reads(
    large: MediaDecoder, container: str, codec: str, files: list[dict[str, Any]], words: str
) -> None:
    data = b"".join(encode(container, codec, **file) for file in files)
    assert words in await refusal(large, Media(MediaKind.VIDEO, data), FramePlan(fps=25.0))


async def test_bytes() -> None:
    decoder = MediaDecoder(dataclasses.replace(LIMITS, max_bytes=500))
    message = await refusal(decoder, Media(MediaKind.VIDEO, bytes(501)))
    assert "bytes; at most 500 are allowed" in message


async def test_frames_looked_at_and_their_memory() -> None:
    data = encode("mp4", "mpeg4", num_frames=40, fps=2, width=800, height=800)
    async with MediaDecoder(dataclasses.replace(LIMITS, max_memory_bytes=64 << 20)) as decoder:
        message = await refusal(decoder, Media(MediaKind.VIDEO, data))
    assert "40 frames of 800 x 800 pixels need 76,800,000 bytes" in message
    limits = dataclasses.replace(LIMITS, max_frames=8, max_memory_bytes=128 << 20)
    async with MediaDecoder(limits) as decoder:
        assert await num_decoded(decoder, data) == 8


async def test_time() -> None:
    limits = dataclasses.replace(LIMITS, timeout_s=0.5)
    async with MediaDecoder(limits) as decoder:
        pid = decoder.worker_pids[0]
        os.kill(pid or 0, signal.SIGSTOP)  # it takes longer than any estimate
        with pytest.raises(MediaError, match=r"takes longer than the 0\.5 s allowed"):
            await decoder.decode(Media(MediaKind.VIDEO, encode("mp4", "libx264")), FramePlan())
        assert decoder.worker_pids[0] != pid
        with pytest.raises(ProcessLookupError):
            while True:
                os.kill(pid or 0, 0)
                await asyncio.sleep(0.01)


async def test_a_bomb_ends_in_an_error_and_the_next_file_is_decoded() -> None:
    # A thousandth of what it unfolds to: 75 MB as decoded, of a size and number that are allowed.
    bomb = encode("mov", "png", num_frames=1, width=3072, height=3072, pix_fmt="rgba64be")
    assert len(bomb) < 100_000
    limits = DecodeLimits(max_memory_bytes=64 << 20, timeout_s=60.0)
    async with MediaDecoder(limits) as decoder:
        with pytest.raises(MediaError, match="more than the 64 MiB of memory allowed"):
            await decoder.decode(Media(MediaKind.VIDEO, bomb), FramePlan())
        assert await num_decoded(decoder, encode("mp4", "libx264")) == 4
    async with MediaDecoder(LIMITS) as decoder:
        assert await num_decoded(decoder, bomb) == 2  # memory is all that it lacked


async def test_the_services_settings_become_limits() -> None:
    settings = EngineSettings(
        model="m", max_video_streams=3, max_stored_frames=5, max_stored_fps=7.0, decode_mib=128
    )
    limits = settings.decode_limits()
    assert (limits.max_streams, limits.max_stored_frames) == (3, 5)
    assert (limits.max_stored_fps, limits.max_memory_bytes) == (7.0, 128 << 20)
