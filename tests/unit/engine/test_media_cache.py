"""Decoded media are kept by content, and decoded once for all who want them at once; features are
kept within a bound of bytes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hippo.engine.bounded import VisionCache
from hippo.engine.media_cache import MediaCache
from hippo.errors import MediaError
from hippo.models.interface.base import DecodedMedia
from hippo.types import FramePlan, Media, MediaKind

PLAN = FramePlan(fps=2.0)
FRAME_BYTES = 96 * 64 * 3  # more than the least that counts


class SlowDecoder:
    """Gives as many frames as the data has bytes, when it is let; refuses b"bad"."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.started: list[bytes] = []
        self.num_cancelled = 0
        self.open = asyncio.Event()
        if is_open:
            self.open.set()

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        self.started.append(media.data)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if media.data == b"bad":
            raise MediaError("no video")
        size = (1, 1) if media.data == b"tiny" else (96, 64)
        frames = torch.zeros(1, dtype=torch.uint8).expand(len(media.data), *size, 3)
        return DecodedMedia(media.kind, frames, (0.0,) * len(media.data), plan.fps)


def video(data: bytes) -> Media:
    return Media(MediaKind.VIDEO, data)


async def test_a_tiny_item_counts_as_what_it_takes_to_keep_it() -> None:
    cache = MediaCache(SlowDecoder(), FRAME_BYTES)
    await cache.decode(video(b"tiny"), PLAN)
    assert cache.num_bytes == 16 << 10


async def test_other_content_plan_kind_or_salt_is_something_else() -> None:
    decoder = SlowDecoder()
    cache = MediaCache(decoder, 100 * FRAME_BYTES)
    await cache.decode(video(b"clip"), PLAN)
    await cache.decode(video(b"clap"), PLAN)
    await cache.decode(video(b"clip"), FramePlan(fps=1.0))
    await cache.decode(video(b"clip"), replace(PLAN, max_pixels=1000))
    await cache.decode(Media(MediaKind.IMAGE, b"clip"), PLAN)
    await cache.decode(video(b"clip"), PLAN, salt="mine")
    assert len(decoder.started) == 6
    await cache.decode(video(b"clip"), PLAN, salt="mine")
    assert len(decoder.started) == 6


async def test_a_large_file_is_hashed_beside_the_event_loop_and_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_threads = []

    async def to_thread(function: Callable[[bytes], Any], data: bytes) -> Any:
        on_threads.append(function)
        return function(data)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    num_bytes = 2**20 + 1
    cache = MediaCache(SlowDecoder(), num_bytes * FRAME_BYTES)
    first = await cache.decode(video(bytes(num_bytes)), PLAN)
    assert await cache.decode(video(bytes(num_bytes)), PLAN) is first
    assert len(on_threads) == 2
    await cache.decode(video(b"clip"), PLAN)
    assert len(on_threads) == 2


async def test_without_room_nothing_is_kept_but_what_runs_is_shared() -> None:
    decoder = SlowDecoder()
    cache = MediaCache(decoder, 0)
    for _ in range(3):
        await cache.decode(video(b"clip"), PLAN)
    assert len(decoder.started) == 3
    await asyncio.gather(*(cache.decode(video(b"clip"), PLAN) for _ in range(3)))
    assert len(decoder.started) == 4
    assert cache.num_bytes == 0


def held() -> tuple[SlowDecoder, MediaCache]:
    """A decoder that is not let yet, and its cache."""
    decoder = SlowDecoder(is_open=False)
    return decoder, MediaCache(decoder, 10 * FRAME_BYTES)


async def ask(
    cache: MediaCache, number: int, data: bytes = b"clip"
) -> list[asyncio.Task[DecodedMedia]]:
    tasks = [asyncio.create_task(cache.decode(video(data), PLAN)) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


async def leave(*tasks: asyncio.Task[DecodedMedia]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_at_once_share_one_decoding_also_if_one_of_them_leaves() -> None:
    decoder, cache = held()
    *staying, leaving = await ask(cache, 3)
    await leave(leaving)
    decoder.open.set()
    one, other = await asyncio.gather(*staying)
    assert one is other and one.frames.shape[0] == 4
    assert (decoder.started, decoder.num_cancelled) == ([b"clip"], 0)


async def test_a_decoding_that_nobody_waits_for_is_cancelled_and_begun_anew() -> None:
    decoder, cache = held()
    await leave(*await ask(cache, 2))
    (later,) = await ask(cache, 1)
    decoder.open.set()
    assert (await later).frames.shape[0] == 4
    assert (len(decoder.started), decoder.num_cancelled) == (2, 1)


async def test_an_error_reaches_all_who_wait_and_is_not_kept() -> None:
    decoder, cache = held()
    asking = await ask(cache, 2, b"bad")
    decoder.open.set()
    for task in asking:
        with pytest.raises(MediaError, match="no video"):
            await task
    with pytest.raises(MediaError, match="no video"):
        await cache.decode(video(b"bad"), PLAN)
    assert len(decoder.started) == 2
    assert cache.num_bytes == 0


ROW_BYTES = 4 * 8


def rows(number: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((number, 8), value)


def test_the_least_recently_used_give_way_when_the_bytes_are_spent() -> None:
    cache = VisionCache(10 * ROW_BYTES)
    for value, digest in enumerate((b"a", b"b", b"c")):
        cache.put(digest, rows(3, float(value)))
    found = [cache.get(digest) for digest in (b"c", b"b", b"a")]
    assert [None if each is None else each[0, 0].item() for each in found] == [2.0, 1.0, 0.0]
    cache.get(b"c")
    cache.get(b"a")

    cache.put(b"d", rows(4))

    assert cache.num_bytes == 10 * ROW_BYTES
    assert [cache.get(digest) is not None for digest in (b"a", b"b", b"d")] == [True, False, True]
    assert (cache.num_hits, cache.num_misses) == (7, 1)


def test_what_is_larger_than_the_bound_is_not_kept_and_pushes_nothing_out() -> None:
    cache = VisionCache(4 * ROW_BYTES)
    cache.put(b"small", rows(2))
    cache.put(b"large", rows(5))
    assert cache.get(b"large") is None
    assert cache.get(b"small") is not None


def test_a_view_does_not_keep_what_it_is_a_view_of() -> None:
    cache = VisionCache(10 * ROW_BYTES)
    whole = rows(1000, 2.0)
    cache.put(b"part", whole[:2])
    part = cache.get(b"part")
    assert part is not None
    assert part.untyped_storage().nbytes() == 2 * ROW_BYTES
    assert torch.equal(part, whole[:2])
