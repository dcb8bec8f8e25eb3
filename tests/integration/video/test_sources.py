"""Files by path and by uuid, and what the model's limits make of them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from hippo.base.local_files import LocalFiles
from hippo.engine.media_cache import MediaCache
from hippo.errors import ContextLengthError, MediaPathError
from hippo.media.resizing import FrameLimits
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.support.clips import image, numbers, refusal, video


def at_path(path: Path, kind: MediaKind = MediaKind.VIDEO) -> Media:
    status = path.stat()
    return Media(kind, path=str(path), num_bytes=status.st_size, modified_ns=status.st_mtime_ns)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decoder(folder: Path) -> AsyncIterator[MediaDecoder]:
    """One that opens files of the folder."""
    async with MediaDecoder(files=LocalFiles([folder])) as decoder:
        yield decoder


@pytest.fixture
def path(folder: Path) -> Path:
    (folder / "clip.mp4").unlink(missing_ok=True)
    (folder / "clip.mp4").write_bytes(video(16).data)
    return folder / "clip.mp4"


async def test_a_file_that_was_changed_meanwhile_may_come_as_bytes(
    decoder: MediaDecoder, path: Path, folder: Path, tmp_path: Path
) -> None:
    """The error is the one at which the gateway sends the file's bytes instead."""
    seen = at_path(path)

    async def reason(media: Media) -> str:
        with pytest.raises(MediaPathError) as caught:
            await decoder.decode(media, FramePlan())
        return caught.value.message

    os.utime(path, ns=(0, seen.modified_ns + 1))
    assert "its size or time" in await reason(seen)
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(0, seen.modified_ns))
    assert "its size or time" in await reason(seen)
    path.unlink()
    assert "it is missing" in await reason(seen)
    path.symlink_to(tmp_path)
    assert "not under a directory" in await reason(seen)
    os.mkfifo(folder / "pipe")
    no_name = Media(MediaKind.VIDEO, path="a\0b")
    for no_file in (at_path(folder / "pipe"), at_path(folder), no_name):
        assert "cannot be read" in await reason(no_file)


async def test_a_changed_file_and_a_uuid_are_keys_of_the_cache(
    decoder: MediaDecoder, path: Path
) -> None:
    cache = MediaCache(decoder, 1 << 20)
    first = await cache.decode(at_path(path), FramePlan())
    assert numbers(first) == [0, 4, 8, 12] and first.is_resized
    assert await cache.decode(at_path(path), FramePlan()) is first
    os.utime(path, ns=(0, 5))
    assert await cache.decode(at_path(path), FramePlan()) is not first
    named = Media(MediaKind.VIDEO, video(16).data, uuid="mine")
    known = await cache.decode(named, FramePlan())
    assert await cache.decode(Media(MediaKind.VIDEO, uuid="mine"), FramePlan()) is known
    assert "no video with the uuid 'other'" in await refusal(
        decoder, Media(MediaKind.VIDEO, uuid="other")
    )


async def test_frames_and_images_are_resized_by_the_worker(
    decoder: MediaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = FrameLimits(
        side_multiple=28,
        video_pixels=(3136, 20_000),
        image_pixels=(3136, 5000),
        max_video_tokens=1000,
    )
    monkeypatch.setattr(decoder, "frame_limits", limits)
    data = video(16, width=320, height=240, rotation=90)
    media = await decoder.decode(data, FramePlan())
    assert media.frames.shape == (4, 140, 112, 3)
    assert numbers(media) == [0, 4, 8, 12]
    still = await decoder.decode(image("PNG", width=400, height=200), FramePlan())
    assert still.frames.shape == (1, 28, 84, 3)
    few = await decoder.decode(data, FramePlan(max_visual_tokens=8))
    assert few.frames.shape == (4, 56, 28, 3)
    with pytest.raises(ContextLengthError, match="take 2: shorten the text") as caught:
        await decoder.decode(data, FramePlan(max_visual_tokens=1))
    assert caught.value.param == "messages"


async def test_a_budget_takes_fewer_of_the_frames(
    decoder: MediaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = FrameLimits(fixed_size=(56, 56), fixed_tokens=4, frame_multiple=1)
    monkeypatch.setattr(decoder, "frame_limits", limits)
    media = await decoder.decode(video(16), FramePlan(fps=8.0, max_visual_tokens=15))
    assert media.frames.shape == (3, 56, 56, 3)
    assert numbers(media) == [0, 5, 10]
