"""Two decoders of one machine decode an item once; neither stops the other."""

import asyncio
import fcntl
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from hippo.errors import MediaError
from hippo.models.interface.base import DecodedMedia
from hippo.types import FramePlan, MediaKind
from hippo.video.decoder import MediaDecoder
from hippo.video.seats import Turns
from hippo.video.shared import SharedFrames
from tests.support.clips import numbers, video

KEY = "00" * 32


def frames(level: int, num_bytes: int = 3000) -> DecodedMedia:
    pixels = torch.full((1, 1, num_bytes // 3, 3), level, dtype=torch.uint8)
    return DecodedMedia(MediaKind.VIDEO, pixels, (0.0,), 2.0, is_resized=True)


Decode = Callable[[int], Awaitable[DecodedMedia | None]]


def giving(level: int, num_bytes: int = 3000) -> Decode:
    async def decode(_: int) -> DecodedMedia:
        return frames(level, num_bytes)

    return decode


async def refusing(_: int) -> DecodedMedia:
    raise AssertionError


async def decoded(
    shared: SharedFrames, key: str, decode: Decode, turns: Turns | None = None
) -> int:
    """The level of what comes of it."""
    turns = turns or Turns(1)
    found = await shared.decode(key, MediaKind.VIDEO, decode, turn=lambda: turns.turn(""))
    return int(found.frames.max())


@pytest.fixture
def shared(tmp_path: Path) -> SharedFrames:
    return SharedFrames(tmp_path, 1 << 20)


async def test_two_services_decode_once(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    async with (
        MediaDecoder(shared=SharedFrames(folder, 1 << 20)) as one,
        MediaDecoder(shared=SharedFrames(folder, 1 << 20)) as other,
    ):
        first, second = await asyncio.gather(
            one.decode(video(16), FramePlan()), other.decode(video(16), FramePlan())
        )
        assert numbers(first) == numbers(second) == [0, 4, 8, 12]
        assert (first.frame_seconds, first.is_resized) == (second.frame_seconds, True)
        assert len(list(folder.glob("*.frames"))) == 1
        second.frames.zero_()  # is this process's own
        await one.decode(video(16), FramePlan(fps=1.0))
        await one.decode(video(16), FramePlan(), salt="mine")
        assert len(list(folder.glob("*.frames"))) == 3
        assert numbers(await other.decode(video(16), FramePlan())) == [0, 4, 8, 12]
    assert not list(folder.glob("*.frames"))
    assert numbers(first) == [0, 4, 8, 12]


async def test_files_are_bounded_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    shared = SharedFrames(tmp_path, 7000)
    for number in range(3):
        await decoded(shared, f"0{number}", giving(number))
    names = sorted(path.name for path in tmp_path.glob("*.frames"))
    assert names == ["01.frames", "02.frames"]
    assert await decoded(shared, "03", giving(3, 9000)) == 3
    assert sum(path.stat().st_size for path in tmp_path.glob("*.frames")) <= 7000


async def test_an_error_frees_the_lock(shared: SharedFrames) -> None:
    async def fail(_: int) -> DecodedMedia:
        raise MediaError("damaged")

    with pytest.raises(MediaError):
        await decoded(shared, KEY, fail)
    await decoded(shared, KEY, giving(1))
    assert await decoded(shared, KEY, refusing) == 1


async def test_a_process_that_hangs_is_not_waited_for(shared: SharedFrames, tmp_path: Path) -> None:
    lock = os.open(tmp_path / f"{KEY}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        neighbour = KEY[:-1] + "1"
        await decoded(shared, neighbour, giving(6))
        assert (tmp_path / f"{neighbour}.frames").exists()  # only who has the lock writes
        assert await decoded(shared, KEY, giving(5)) == 5
    finally:
        os.close(lock)
    assert not (tmp_path / f"{KEY}.frames").exists()


async def test_a_process_that_waits_for_its_own_decoder_is_not_waited_for(
    shared: SharedFrames, tmp_path: Path
) -> None:
    other = SharedFrames(tmp_path, 1 << 20)  # of another process
    turns = Turns(1)
    async with turns.turn(""):  # the draft's decoder is at work on something else
        waiting = asyncio.create_task(decoded(shared, KEY, refusing, turns))
        while not list(tmp_path.glob("*.lock")):
            await asyncio.sleep(0.001)
        await decoded(other, KEY, giving(3))
        assert (tmp_path / f"{KEY}.frames").exists()
    assert await waiting == 3
    assert not list(tmp_path.glob("*.lock"))


async def test_a_decoder_that_waits_for_another_process_is_free(
    shared: SharedFrames, tmp_path: Path
) -> None:
    turns, begun, going_on = Turns(1), asyncio.Event(), asyncio.Event()

    async def slow(_: int) -> DecodedMedia:
        begun.set()
        await going_on.wait()
        return frames(3)

    first = asyncio.create_task(decoded(SharedFrames(tmp_path, 1 << 20), KEY, slow))
    await begun.wait()  # it has the lock
    second = asyncio.create_task(decoded(shared, KEY, refusing, turns))
    await decoded(shared, "11" * 32, giving(1), turns)
    assert not second.done()
    going_on.set()
    assert [await first, await second] == [3, 3]


async def test_what_is_too_expensive_for_one_turn_is_decoded_in_another(
    shared: SharedFrames,
) -> None:
    turns, seats = Turns(2), list[int]()

    async def decode(seat: int) -> DecodedMedia | None:
        seats.append(seat)
        return frames(4) if len(seats) == 2 else None

    assert (await decoded(shared, KEY, decode, turns), seats) == (4, [0, 0])
    assert await decoded(shared, KEY, refusing) == 4


async def test_a_full_disk_or_a_lost_folder_only_ends_the_sharing(
    shared: SharedFrames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hippo.video.shared.os.link", refuse)
        assert [await decoded(shared, KEY, giving(level)) for level in (1, 2)] == [1, 2]
    shutil.rmtree(tmp_path)
    assert await decoded(shared, KEY, giving(7)) == 7
