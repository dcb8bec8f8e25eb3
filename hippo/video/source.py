"""Names the content of a media item, and opens its file for the worker process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator

from hippo.errors import MediaError
from hippo.types import Media
from hippo.video.process import map_whole, shared_file

ContentName = tuple[str, int, int] | bytes

_LARGE_BYTES = 1 << 20  # larger files are hashed outside the event loop


async def content_name(media: Media) -> ContentName:
    """Returns the file's path, size and time of change, or the SHA-256 of its bytes."""
    if media.path:
        return media.path, media.num_bytes, media.modified_ns
    data = media.data
    if len(data) < _LARGE_BYTES:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


@contextlib.contextmanager
def opened_media(media: Media) -> Iterator[int]:
    """Opens the item's bytes as a file, and yields its descriptor; may block.

    The caller has checked that the service may open ``media.path``. Raises MediaError for a path
    that cannot be read, or whose file is not the one that the gateway saw.
    """
    descriptor = _open_path(media) if media.path else shared_file(len(media.data))
    try:
        if not media.path:
            with map_whole(descriptor, len(media.data)) as memory:
                memory[:] = media.data
        yield descriptor
    finally:
        os.close(descriptor)


def _open_path(media: Media) -> int:
    kind, name = media.kind.value, os.path.basename(media.path)
    try:
        # A pipe without a writer would block.
        descriptor = os.open(media.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MediaError(
            f"the {kind} {name!r} cannot be read ({reason}); this service must see the "
            "same file as the gateway"
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise MediaError(f"the {kind} {name!r} is not a file")
    if (status.st_size, status.st_mtime_ns) != (media.num_bytes, media.modified_ns):
        os.close(descriptor)
        raise MediaError(
            f"the {kind} {name!r} is not the file that the gateway saw: it has changed, or "
            "is another one on this machine; send the request again"
        )
    return descriptor
