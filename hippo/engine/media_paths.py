"""Checks the files that a request names by path, before they are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hippo.errors import ForbiddenError, MediaError, MediaPathError
from hippo.local_files import LocalFiles
from hippo.types import Media


def checked_paths(media: Sequence[Media], files: LocalFiles) -> tuple[Media, ...]:
    """Returns the media, with the links in their paths resolved.

    Raises MediaPathError for a path outside the directories of ``files``, and for a file that is
    missing, unreadable, or not the one that the sender has seen: of another size or time. The
    message has the file's name alone, because a path may be the gateway's, not the client's.
    """
    return tuple(_checked(item, index, files) for index, item in enumerate(media))


def _checked(item: Media, index: int, files: LocalFiles) -> Media:
    if not item.path:
        return item
    name = Path(item.path).name
    try:
        with files.open_file(item.path) as file:
            if (file.num_bytes, file.modified_ns) == (item.num_bytes, item.modified_ns):
                return replace(item, path=str(file.path))
        reason = "its size or time is not that which the gateway sees"
    except ForbiddenError:
        reason = "it is not under a directory of its --allowed-local-media-path"
    except MediaError:
        reason = "it is missing or cannot be read"
    raise MediaPathError(
        f"the service cannot open {name!r} by its path: {reason}", param=f"media[{index}]"
    )
