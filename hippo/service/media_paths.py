"""Checks the files that a request names by path, before they are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hippo.base.local_files import LocalFiles
from hippo.errors import MediaPathError
from hippo.types import Media
from hippo.video.source import opened_path


def checked_paths(media: Sequence[Media], files: LocalFiles) -> tuple[Media, ...]:
    """Returns the media, with the links in their paths resolved.

    Raises MediaPathError as ``opened_path`` does, with the item as ``param``.
    """
    return tuple(_checked(item, index, files) for index, item in enumerate(media))


def _checked(item: Media, index: int, files: LocalFiles) -> Media:
    if not item.path:
        return item
    try:
        with opened_path(item, files) as file:
            return replace(item, path=str(file.path))
    except MediaPathError as error:
        error.param = f"media[{index}]"
        raise
