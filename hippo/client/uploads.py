"""Videos too large for a request: uploaded to a hippo gateway, and asked about by their id."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

from rich.console import Console

from hippo.client.requests import IMAGE_SUFFIXES, REMOTE, UploadId
from hippo.client.server import Server, error_from
from hippo.errors import HippoError

LARGEST_INLINE = 96 << 20
"""Bytes of the largest file that a request takes by the gateway's default --max-body-bytes."""


@contextmanager
def sent_media(server: Server, media: str, console: Console | None = None) -> Iterator[str]:
    """Yields what stands for a file or URL in requests to a hippo gateway: the file or URL itself,
    or, for a local video that a request cannot hold, the id of an upload.

    The upload is deleted at the end. ``console`` shows that it is going on. Raises
    InvalidRequestError if the file cannot be read, and the HippoError that fits the gateway's
    answer.
    """
    path, is_large = Path(media).expanduser(), False
    if not media.startswith(REMOTE) and path.suffix.lower() not in IMAGE_SUFFIXES:
        with suppress(OSError):  # whoever reads the file says why it cannot be read
            is_large = path.stat().st_size > LARGEST_INLINE
    if not is_large:
        yield media
        return
    with closing(server.connect()) as connection:
        with console.status(f"uploading {media} ...") if console else nullcontext():
            status, data = connection.exchange("POST", "/videos", path)
        if status != 200:
            raise error_from(status, data)
        video_id = UploadId(json.loads(data)["id"])
        try:
            yield video_id
        finally:
            with suppress(HippoError):  # it expires by itself
                connection.exchange("DELETE", f"/videos/{video_id}")
