"""A JSONL file to which lines are appended, and with which stopped work goes on."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hippo.errors import InvalidRequestError

TakeLine = Callable[[int, bytes], None]


class JsonLines:
    """Reads the lines of a file, and appends further ones, each in one write.

    ``take`` gets each line with its number, and raises ValueError, KeyError or TypeError for a
    line of another kind. A last line that ``take`` does not take is removed: a stop in the middle
    of a write leaves such a line. Raises InvalidRequestError for another such line, and for a file
    that cannot be read or written; an error of ``take`` leaves the file as it is.
    """

    def __init__(self, path: Path, take: TakeLine, *, kind: str) -> None:
        """``kind`` says what a line is, for errors."""
        self._path = path
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from None
        self.is_empty = not data
        lines = data.split(b"\n")
        num_whole = 0
        for number, line in enumerate(lines, 1):
            try:
                take(number, line)
            except (ValueError, KeyError, TypeError):
                # After the last whole line is an empty one, or the rest of one that was cut off.
                if number < len(lines) - 1 or (number == 1 and len(lines) > 1):
                    raise InvalidRequestError(f"{path}, line {number}: this is no {kind}") from None
                break
            num_whole += len(line) + 1
        if num_whole > len(data):  # only the last line's end is missing
            self._write(b"\n")
        elif num_whole < len(data):
            with self._told_errors():
                os.truncate(path, num_whole)

    def append(self, line: Mapping[str, Any]) -> None:
        """Appends a line. Raises InvalidRequestError if the file cannot be written."""
        self._write(json.dumps(line).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        with self._told_errors(), self._path.open("ab", buffering=0) as file:
            file.write(data)

    @contextmanager
    def _told_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InvalidRequestError(f"{self._path} cannot be written: {error.strerror}") from None
