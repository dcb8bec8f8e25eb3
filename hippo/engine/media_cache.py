"""Caches decoded media by content: a second question about a clip does not decode its file again.

The content's name is the file's path, size and time of change, else the client's uuid, else a
SHA-256. Concurrent requests with the same key share one decoding.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Protocol

from hippo.base.tasks import start_task
from hippo.engine.bounded import BoundedCache
from hippo.models.interface.base import DecodedMedia
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.source import ContentName, content_name

_LEAST_BYTES = 16 << 10  # least size of an entry in the sum, which bounds the number of entries

_Key = tuple[ContentName | tuple[str], MediaKind, FramePlan, str]


class Decoder(Protocol):
    """Decodes media outside this process; results may be shared under the same ``salt`` only, and
    clients take turns."""

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia: ...


@dataclass(slots=True, eq=False)
class _Decoding:
    """A decoding in progress, and the number of requests that wait for it."""

    task: asyncio.Task[DecodedMedia]
    num_waiting: int = 0


class MediaCache(BoundedCache[_Key, DecodedMedia]):
    """Decodes media that it does not hold with ``decoder``; belongs to one event loop."""

    def __init__(self, decoder: Decoder, max_bytes: int) -> None:
        super().__init__(max_bytes, size=lambda one: max(one.frames.nbytes, _LEAST_BYTES))
        self._decoder = decoder
        self._running: dict[_Key, _Decoding] = {}

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        """Returns the item's planned frames, read-only. Raises the decoder's exceptions.

        Frames decoded for another ``salt`` are not used. It is the turn of the ``client`` that asks
        first. A decoding is cancelled when no request waits for it any more.
        """
        name = (media.uuid,) if media.uuid and not media.path else await content_name(media)
        if media.kind is MediaKind.IMAGE:
            plan = replace(plan, max_visual_tokens=0)  # which is for videos
        key = name, media.kind, plan, salt
        if (decoded := self.get(key)) is not None:
            return decoded
        running = self._running.get(key)
        if running is None:
            running = _Decoding(start_task(self._decode(key, media, plan, salt, client)))
            self._running[key] = running
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting:
                del self._running[key]
                running.task.cancel()

    async def _decode(
        self, key: _Key, media: Media, plan: FramePlan, salt: str, client: str
    ) -> DecodedMedia:
        decoded = await self._decoder.decode(media, plan, salt=salt, client=client)
        self.put(key, decoded)
        return decoded
