"""Videos too large for a request: uploaded to a hippo gateway, and asked about by their id."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from hippo.client.requests import IMAGE_SUFFIXES, REMOTE, UploadId
from hippo.client.server import Server, error_from
from hippo.errors import HippoError, InvalidRequestError

LARGEST_INLINE = 96 << 20
"""Bytes of the largest file that a request takes by the gateway's default --max-body-bytes."""

_PIECE_BYTES = 1 << 20


@contextmanager
def sent_media(server: Server, media: str, console: Console | None = None) -> Iterator[str]:
    """Yields what stands for a file or URL in requests to a hippo gateway: the file or URL itself,
    or, for a local video that a request cannot hold, the id of an upload.

    The upload is deleted at the end. ``console`` shows that it is going on. Raises
    InvalidRequestError if the file cannot be read, and the HippoError that fits the gateway's
    answer.
    """
    if not _is_large(media):
        yield media
        return
    path = Path(media).expanduser()
    with closing(server.connect()) as connection:
        with console.status(f"uploading {media} ...") if console else nullcontext():
            status, data = connection.send("POST", "/videos", VideoForm(path))
        if status != 200:
            raise error_from(status, data)
        video_id = UploadId(json.loads(data)["id"])
        try:
            yield video_id
        finally:
            with suppress(HippoError):  # it expires by itself
                connection.send("DELETE", f"/videos/{video_id}")


def _is_large(media: str) -> bool:
    """Whether ``media`` is a local video that a request cannot hold."""
    if media.startswith(REMOTE) or Path(media).suffix.lower() in IMAGE_SUFFIXES:
        return False
    try:
        return Path(media).expanduser().stat().st_size > LARGEST_INLINE
    except OSError:  # whoever reads the file says why it cannot be read
        return False


class VideoForm:
    """A multipart form with one file, which is read while it is sent. Raises InvalidRequestError if
    the file cannot be read."""

    def __init__(self, path: Path) -> None:
        boundary = uuid.uuid4().hex
        self.content_type = f"multipart/form-data; boundary={boundary}"
        self._path = path
        self._head = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; '
            f'filename="{quote(path.name)}"\r\ncontent-type: application/octet-stream\r\n\r\n'
        ).encode()
        self._tail = f"\r\n--{boundary}--\r\n".encode()
        try:
            self._num_bytes = path.stat().st_size
        except OSError as error:
            raise self._unreadable(error) from None

    @property
    def content_length(self) -> int:
        """Bytes of the whole form."""
        return len(self._head) + self._num_bytes + len(self._tail)

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        num_left = self._num_bytes
        try:
            with self._path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    num_left -= len(piece)
                    if num_left < 0:
                        break
                    yield piece
        except OSError as error:
            raise self._unreadable(error) from None
        if num_left:
            raise InvalidRequestError(f"{self._path} was changed while it was sent")
        yield self._tail

    def _unreadable(self, error: OSError) -> InvalidRequestError:
        return InvalidRequestError(f"{self._path} cannot be read: {error.strerror}")
