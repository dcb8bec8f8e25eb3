"""Files by path and by uuid, and what the model's limits make of them."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from hippo.base.local_files import LocalFiles
from hippo.engine.media_cache import MediaCache
from hippo.errors import ContextLengthError, MediaPathError
from hippo.media.resizing import FrameLimits
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.support.clips import at_path, image, numbers, refusal, video

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decoder(folder: Path) -> AsyncIterator[MediaDecoder]:
    """One that opens files of the folder."""
    async with MediaDecoder(files=LocalFiles([folder])) as decoder:
        yield decoder


async def test_a_changed_file_and_a_uuid_are_keys_of_the_cache(
    decoder: MediaDecoder, folder: Path
) -> None:
    path = folder / "clip.mp4"
    path.write_bytes(video(16).data)
    cache = MediaCache(decoder, 1 << 20)
    first = await cache.decode(at_path(path), FramePlan())
    assert numbers(first) == [0, 4, 8, 12] and first.is_resized
    assert await cache.decode(at_path(path), FramePlan()) is first
    seen = at_path(path)
    os.utime(path, ns=(0, 5))
    assert await cache.decode(at_path(path), FramePlan()) is not first
    with pytest.raises(MediaPathError, match="its size or time"):
        await decoder.decode(seen, FramePlan())
    named = Media(MediaKind.VIDEO, video(16).data, uuid="mine")
    known = await cache.decode(named, FramePlan())
    assert await cache.decode(Media(MediaKind.VIDEO, uuid="mine"), FramePlan()) is known
    unknown = Media(MediaKind.VIDEO, uuid="other")
    assert "no video with the uuid 'other'" in await refusal(decoder, unknown)


async def test_frames_and_images_are_resized_by_the_worker(
    decoder: MediaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels: Any = {"video_pixels": (3136, 20_000), "image_pixels": (3136, 5000)}
    limits = FrameLimits(side_multiple=28, max_video_tokens=1000, **pixels)
    monkeypatch.setattr(decoder, "frame_limits", limits)
    data = video(16, width=320, height=240, rotation=90)
    media = await decoder.decode(data, FramePlan())
    assert (media.frames.shape, numbers(media)) == ((4, 140, 112, 3), [0, 4, 8, 12])
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
    assert (media.frames.shape, numbers(media)) == ((3, 56, 56, 3), [0, 5, 10])
