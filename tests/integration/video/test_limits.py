"""Each limit of the decoder, with a file that was made to exceed it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from pathlib import Path

import pytest

from hippo.engine.settings import EngineSettings
from hippo.errors import MediaError
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from hippo.video.limits import DecodeLimits
from tests.fuzz.corpus import encode
from tests.support.clips import refusal

LIMITS = DecodeLimits(max_memory_bytes=256 << 20, timeout_s=100.0)


async def refused(data: bytes, *, fps: float = 0.0, **limits: float) -> str:
    """The message of a decoder with these limits."""
    async with MediaDecoder(dataclasses.replace(LIMITS, **limits)) as decoder:  # type: ignore[arg-type]
        return await refusal(decoder, Media(MediaKind.VIDEO, data), FramePlan(fps=fps))


async def decodes(data: bytes, **limits: float) -> int:
    async with MediaDecoder(dataclasses.replace(LIMITS, **limits)) as decoder:  # type: ignore[arg-type]
        return len((await decoder.decode(Media(MediaKind.VIDEO, data), FramePlan())).frames)


async def _wait_for_end(pid: int) -> None:
    """Returns never: the process's end is a ProcessLookupError."""
    while True:
        os.kill(pid or 0, 0)
        await asyncio.sleep(0.01)


async def test_tracks() -> None:
    data = encode("matroska", "libx264", num_audio=8)
    message = await refused(data, max_streams=8)
    assert message == ("the file has 9 tracks; at most 8 are allowed: send the video's track alone")
    assert await decodes(data, max_streams=9) == 4


async def test_frames_in_the_file() -> None:
    data = encode("matroska", "mpeg4", num_frames=120, fps=30)
    message = await refused(data, max_stored_frames=119)
    assert "more than the 119 frames allowed" in message
    assert await decodes(data, max_stored_frames=120) == 8


async def test_frames_a_second() -> None:
    data = encode("matroska", "mpeg4", num_frames=50, fps=1000)
    message = await refused(data, max_stored_fps=500)
    assert "frames a second; at most 500 are allowed" in message
    assert await decodes(data, max_stored_fps=1001) == 4


async def test_seconds() -> None:
    data = encode("matroska", "mpeg4", num_frames=3, ticks=[0, 1000, 20_000_000])
    assert "at most 14400 s are allowed" in await refused(data)


async def test_pixels() -> None:
    data = encode("mp4", "libx264", width=130, height=100)
    message = await refused(data, max_pixels=12_999)
    assert "130 x 100 pixels; at most 12,999 are allowed" in message
    assert await decodes(data, max_pixels=13_000) == 4


async def test_a_size_that_changes_within_the_stream() -> None:
    small = encode("h264", "libx264", num_frames=4)
    large = encode("h264", "libx264", num_frames=4, width=256, height=256)
    message = await refused(small + large, fps=25.0, max_pixels=20_000)
    assert "256 x 256 pixels; at most 20,000 are allowed" in message


async def test_bytes() -> None:
    data = encode("mp4", "libx264")
    assert "bytes; at most 500 are allowed" in await refused(data, max_bytes=500)


async def test_frames_looked_at_and_their_memory() -> None:
    data = encode("mp4", "mpeg4", num_frames=40, fps=2, width=800, height=800)
    message = await refused(data, max_memory_bytes=64 << 20)
    assert "40 frames of 800 x 800 pixels need 76,800,000 bytes" in message
    assert await decodes(data, max_frames=8, max_memory_bytes=128 << 20) == 8


async def test_time() -> None:
    # Many frames and seconds in a small file, all of which are to be looked at.
    bomb = encode("matroska", "mpeg4", num_frames=700, fps=30, width=256, height=256)
    limits = dataclasses.replace(LIMITS, timeout_s=0.02)
    async with MediaDecoder(limits) as decoder:
        pid = decoder.worker_pid
        with pytest.raises(MediaError, match=r"takes longer than the 0\.02 s allowed"):
            await decoder.decode(Media(MediaKind.VIDEO, bomb), FramePlan(fps=240))
        assert decoder.worker_pid != pid
        with pytest.raises(ProcessLookupError):
            await _wait_for_end(pid or 0)


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="Linux counts the memory")
async def test_the_worker_cannot_take_more_memory_than_it_may() -> None:
    async with MediaDecoder(LIMITS) as decoder:
        pid = decoder.worker_pid
        limits = Path(f"/proc/{pid}/limits").read_text()
        found = re.search(r"Max address space\s+(\d+)\s+(\d+)", limits)
        assert found is not None
        soft, hard = int(found[1]), int(found[2])
        in_use = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        assert soft == hard
        assert soft - in_use <= LIMITS.max_memory_bytes


async def test_a_bomb_ends_in_an_error_and_the_next_file_is_decoded() -> None:
    # A thousandth of what it unfolds to: 75 MB as decoded, of a size and number that are allowed.
    bomb = encode("mov", "png", num_frames=1, width=3072, height=3072, pix_fmt="rgba64be")
    assert len(bomb) < 100_000
    limits = DecodeLimits(max_memory_bytes=64 << 20, timeout_s=60.0)
    async with MediaDecoder(limits) as decoder:
        for _ in range(2):
            with pytest.raises(MediaError, match="more than the 64 MiB of memory allowed"):
                await decoder.decode(Media(MediaKind.VIDEO, bomb), FramePlan())
        good = Media(MediaKind.VIDEO, encode("mp4", "libx264"))
        assert len((await decoder.decode(good, FramePlan())).frames) == 4
    assert await decodes(bomb) == 2  # memory is all that it lacked


def test_the_services_settings_become_limits() -> None:
    settings = EngineSettings(
        model="m", max_video_streams=3, max_stored_frames=5, max_stored_fps=7.0, decode_mib=128
    )
    limits = settings.decode_limits()
    assert (limits.max_streams, limits.max_stored_frames) == (3, 5)
    assert (limits.max_stored_fps, limits.max_memory_bytes) == (7.0, 128 << 20)
