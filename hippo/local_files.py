"""Files that requests name by path, under the directories that the operator allows."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hippo.config import SettingsError
from hippo.errors import ForbiddenError, MediaError


@dataclass(frozen=True, slots=True)
class LocalFile:
    """An open regular file; ``path`` has no symbolic links."""

    path: Path
    descriptor: int
    num_bytes: int
    modified_ns: int  # since the epoch, modulo 2**64: files may be older


class LocalFiles:
    """The regular files under ``directories``, after symbolic links are resolved."""

    def __init__(self, directories: Sequence[str | Path]) -> None:
        self.directories = tuple(Path(each).resolve() for each in directories)

    def contains(self, path: Path) -> bool:
        """Whether a resolved path lies under one of the directories."""
        return any(path.is_relative_to(directory) for directory in self.directories)

    @contextmanager
    def open_file(self, path: str) -> Iterator[LocalFile]:
        """Opens a file for the time of the ``with`` block.

        Raises ForbiddenError for a path outside the directories, whether or not the file exists, so
        that clients cannot probe for files; MediaError for a path that is no readable regular file.
        """
        shown = repr(shorten(path))
        try:
            resolved = Path(path).resolve()
        except (OSError, RuntimeError, ValueError):  # link loops, null bytes
            raise MediaError(f"{shown} is not a usable path") from None
        if not self.contains(resolved):
            raise ForbiddenError(f"{shown} is not under an allowed directory")
        try:
            # O_NONBLOCK: a FIFO must not block the thread. O_NOFOLLOW: links were resolved above.
            descriptor = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            raise MediaError(f"{shown} cannot be read: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MediaError(f"{shown} is not a regular file")
            yield LocalFile(resolved, descriptor, status.st_size, status.st_mtime_ns % 2**64)
        finally:
            os.close(descriptor)


def check_directories(names: Sequence[str], flag: str) -> None:
    """Raises SettingsError for a name of a setting's value that is not a directory."""
    for name in names:
        if not Path(name).is_dir():
            raise SettingsError(f"{flag}: {name} is not a directory")


def shorten(text: str) -> str:
    """Returns a text for an error message, cut to 80 characters."""
    return text if len(text) <= 80 else text[:77] + "..."
