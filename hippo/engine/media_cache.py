"""Decoded media by content: a second question about a clip does not decode its file again.

    SHA-256 of the file, its kind, the frame plan, the salt  ──►  frames, in the host's memory

Several requests that want the same at once wait for one decoding.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace
from typing import Protocol

from hippo.engine.bounded import BoundedCache
from hippo.models.base import DecodedMedia
from hippo.types import FramePlan, Media, MediaKind

_LARGE_BYTES = 1 << 20  # hashing more would hold up the event loop
_LEAST_BYTES = 16 << 10  # that an entry counts as, so that tiny ones cannot become too many

_Key = tuple[bytes, MediaKind, FramePlan, str]


class Decoder(Protocol):
    """Decodes media outside this process."""

    async def decode(self, media: Media, plan: FramePlan) -> DecodedMedia: ...


@dataclass(slots=True, eq=False)
class _Decoding:
    """One that runs, and how many requests wait for it."""

    task: asyncio.Task[DecodedMedia]
    num_waiting: int = 0


class MediaCache(BoundedCache[_Key, DecodedMedia]):
    """Decodes with ``decoder`` what it does not have. Belongs to one event loop."""

    def __init__(self, decoder: Decoder, max_bytes: int) -> None:
        super().__init__(max_bytes, size=lambda one: max(one.frames.nbytes, _LEAST_BYTES))
        self._decoder = decoder
        self._running: dict[_Key, _Decoding] = {}

    async def decode(self, media: Media, plan: FramePlan, *, salt: str = "") -> DecodedMedia:
        """The item's planned frames, not to be written; what was decoded for another ``salt`` is
        of no help. Raises what the decoder raises.

        A decoding is cancelled when nobody waits for it any more.
        """
        seen = replace(plan, max_pixels=0)  # to which the model resizes, not the decoder
        key = await _digest(media.data), media.kind, seen, salt
        if (decoded := self.get(key)) is not None:
            return decoded
        running = self._running.get(key)
        if running is None:
            running = _Decoding(asyncio.create_task(self._decode(key, media, plan)))
            self._running[key] = running
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting:
                del self._running[key]
                running.task.cancel()
            del running  # its error holds this frame

    async def _decode(self, key: _Key, media: Media, plan: FramePlan) -> DecodedMedia:
        decoded = await self._decoder.decode(media, plan)
        self.put(key, decoded)
        return decoded


async def _digest(data: bytes) -> bytes:
    if len(data) < _LARGE_BYTES:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
