"""Files that requests name by path, under the directories that the operator allows."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hippo.base.config import SettingsError
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
        self._names = (*self.directories, *(Path(each).absolute() for each in directories))

    def contains(self, path: Path) -> bool:
        """Whether a resolved path lies under one of the directories."""
        return any(path.is_relative_to(directory) for directory in self.directories)

    @contextmanager
    def open_file(self, path: str) -> Iterator[LocalFile]:
        """Opens a file for the time of the ``with`` block.

        Raises ForbiddenError for a path outside the directories, before the file system is asked
        about it, so that clients cannot probe for files, and for a link that leads outside;
        MediaError for a path that is no readable regular file.
        """
        shown = repr(shorten(path))
        outside = ForbiddenError(f"{shown} is not under an allowed directory")
        if "\0" in path:
            raise MediaError(f"{shown} is not a usable path")
        named = Path(os.path.normpath(path))  # a directory's name may itself have links in it
        if not any(named.is_relative_to(directory) for directory in self._names):
            raise outside
        try:
            resolved = Path(path).resolve()
        except (OSError, RuntimeError, ValueError):  # link loops
            raise MediaError(f"{shown} is not a usable path") from None
        if not self.contains(resolved):
            raise outside
        try:
            # O_NONBLOCK: a FIFO must not block the thread. O_NOFOLLOW: links were resolved above.
            descriptor = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            raise MediaError(f"{shown} cannot be read: {error.strerror}") from None
        try:
            # A folder on the way may have become a link since.
            if not self.contains(_path_of(descriptor, resolved)):
                raise outside
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MediaError(f"{shown} is not a regular file")
            yield LocalFile(resolved, descriptor, status.st_size, status.st_mtime_ns % 2**64)
        finally:
            os.close(descriptor)


def _path_of(descriptor: int, opened: Path) -> Path:
    """Returns the path of an open file; without /proc (not Linux) the path that was opened."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return opened


def check_directories(names: Iterable[str], flag: str) -> None:
    """Raises SettingsError for a name of a setting's value that is not a directory."""
    for name in names:
        if not Path(name).is_dir():
            raise SettingsError(f"{flag}: {name} is not a directory")


def shorten(text: str) -> str:
    """Returns a text for an error message, cut to 80 characters."""
    return text if len(text) <= 80 else text[:77] + "..."
