"""Files by path and by uuid, and what the model's limits make of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hippo.engine.media_cache import MediaCache
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from hippo.video.resizing import FrameLimits
from tests.support.clips import image, numbers, refusal, video


def at_path(path: Path, kind: MediaKind = MediaKind.VIDEO) -> Media:
    status = path.stat()
    return Media(kind, path=str(path), num_bytes=status.st_size, modified_ns=status.st_mtime_ns)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "clip.mp4").write_bytes(video(16).data)
    return tmp_path / "clip.mp4"


async def test_a_file_is_opened_by_its_path(decoder: MediaDecoder, path: Path) -> None:
    media = await decoder.decode(at_path(path), FramePlan())
    assert numbers(media) == [0, 4, 8, 12]
    assert media.is_resized


async def test_another_file_than_the_gateways_is_refused(decoder: MediaDecoder, path: Path) -> None:
    seen = at_path(path)
    os.utime(path, ns=(0, seen.modified_ns + 1))
    assert "it has changed" in await refusal(decoder, seen)
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(0, seen.modified_ns))
    assert "it has changed" in await refusal(decoder, seen)
    path.unlink()
    assert "cannot be read (No such file or directory)" in await refusal(decoder, seen)


async def test_only_files_are_opened(decoder: MediaDecoder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        assert "is not a file" in await refusal(decoder, at_path(path))
    assert "cannot be read" in await refusal(decoder, Media(MediaKind.VIDEO, path="a\0b"))


async def test_a_changed_file_and_a_uuid_are_keys_of_the_cache(
    decoder: MediaDecoder, path: Path
) -> None:
    cache = MediaCache(decoder, 1 << 20)
    first = await cache.decode(at_path(path), FramePlan())
    assert await cache.decode(at_path(path), FramePlan()) is first
    os.utime(path, ns=(0, 5))
    assert await cache.decode(at_path(path), FramePlan()) is not first
    named = Media(MediaKind.VIDEO, video(16).data, uuid="mine")
    known = await cache.decode(named, FramePlan())
    assert await cache.decode(Media(MediaKind.VIDEO, uuid="mine"), FramePlan()) is known
    assert "no video with the uuid 'other'" in await refusal(
        decoder, Media(MediaKind.VIDEO, uuid="other")
    )


async def test_frames_and_images_are_resized_by_the_worker(decoder: MediaDecoder) -> None:
    decoder.frame_limits = FrameLimits(
        side_multiple=28,
        video_pixels=(3136, 20_000),
        image_pixels=(3136, 5000),
        max_video_tokens=1000,
    )
    data = video(16, width=320, height=240, rotation=90)
    media = await decoder.decode(data, FramePlan())
    assert media.frames.shape == (4, 140, 112, 3)
    assert numbers(media) == [0, 4, 8, 12]
    assert (
        await decoder.decode(image("PNG", width=400, height=200), FramePlan())
    ).frames.shape == (
        1,
        28,
        84,
        3,
    )
    few = await decoder.decode(data, FramePlan(max_visual_tokens=8))
    assert few.frames.shape == (4, 56, 28, 3)


async def test_a_budget_takes_fewer_of_the_frames(decoder: MediaDecoder) -> None:
    decoder.frame_limits = FrameLimits(fixed_size=(56, 56), fixed_tokens=4, frame_multiple=1)
    media = await decoder.decode(video(16), FramePlan(fps=8.0, max_visual_tokens=15))
    assert media.frames.shape == (3, 56, 56, 3)
    assert numbers(media) == [0, 5, 10]
