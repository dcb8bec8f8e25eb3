"""Names the content of a media item, and opens its file for the worker process."""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from hippo.base.local_files import LocalFile, LocalFiles
from hippo.base.worker_process import in_memory
from hippo.errors import ForbiddenError, MediaError, MediaPathError
from hippo.types import Media

ContentName = tuple[str, int, int] | bytes

_LARGE_BYTES = 1 << 20  # larger files are hashed outside the event loop


async def content_name(media: Media) -> ContentName:
    """Returns the file's path, size and time of change, or the SHA-256 of its bytes."""
    if media.path:
        return media.path, media.num_bytes, media.modified_ns
    if len(media.data) < _LARGE_BYTES:
        return hashlib.sha256(media.data).digest()
    return (await asyncio.to_thread(hashlib.sha256, media.data)).digest()


@contextlib.contextmanager
def opened_media(media: Media, files: LocalFiles) -> Iterator[int]:
    """Opens the item's bytes as a file, and yields its descriptor; may block. Raises
    MediaPathError as ``opened_path`` does."""
    if media.path:
        with opened_path(media, files) as file:
            yield file.descriptor
        return
    with in_memory(media.data) as descriptor:
        yield descriptor


@contextlib.contextmanager
def opened_path(media: Media, files: LocalFiles) -> Iterator[LocalFile]:
    """Opens the file of an item that has a path.

    Raises MediaPathError for a path outside the directories of ``files``, and for a file that is
    missing, unreadable, or has another size or time than the sender has seen. The
    message has the file's name alone, because a path may be the gateway's, not the client's.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(files.open_file(media.path))
        except ForbiddenError:
            reason = "it is not under a directory of its --allowed-local-media-path"
        except MediaError:
            reason = "it is missing or cannot be read"
        else:
            if (file.num_bytes, file.modified_ns) == (media.num_bytes, media.modified_ns):
                yield file
                return
            reason = "its size or time is not what the gateway sees"
    raise MediaPathError(f"the service cannot open {Path(media.path).name!r} by its path: {reason}")
