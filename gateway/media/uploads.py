"""Uploaded videos: kept on disk until they expire, so that several requests can name their ids."""

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway.common.config import GatewaySettings
from hippo.errors import HippoError, InvalidRequestError, MediaError, NotFoundError

_PREFIX = "hippo-uploads-"
_ID = re.compile(r"video-[0-9a-f]{32}")

ReadPiece = Callable[[], Awaitable[bytes]]


def too_large(what: str, max_bytes: int, *, param: str | None = None) -> MediaError:
    """Returns the error of a file of more than ``max_bytes``."""
    limit = f"{max_bytes} bytes, this server's limit (--max-media-bytes)"
    return MediaError(f"the {what} is larger than {limit}", param=param)


class UploadsFullError(HippoError):
    """The uploads leave no room for another one."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 507
    type_name = "insufficient_storage_error"


@dataclass(slots=True)
class Upload:
    """One video; only the API key named ``owner``, which uploaded it, can use it."""

    video_id: str
    filename: str
    num_bytes: int
    created_s: float  # seconds since the epoch
    expires_s: float
    owner: str | None
    num_uses: int = 0  # by requests at work


def is_upload_id(url: str) -> bool:
    """Whether a video_url has the form of an upload's id."""
    return _ID.fullmatch(url) is not None


class Uploads:
    """Uploaded videos by id, until they expire; all are deleted when the gateway stops.

    They lie in a ``folder`` of their own, which is locked. A gateway that starts deletes the
    folders of gateways that were killed, because their locks are free.
    """

    def __init__(
        self, settings: GatewaySettings, *, clock_s: Callable[[], float] = time.time
    ) -> None:
        parent = Path(settings.upload_dir or tempfile.gettempdir()).resolve()
        _delete_abandoned(parent)
        self.folder, self._lock = _make_folder(parent)
        self._max_bytes = settings.max_upload_bytes  # for all uploads together
        self._max_uploads = settings.max_uploads
        self._max_file_bytes = settings.max_media_bytes
        self._ttl_s = settings.upload_ttl_s
        self._clock_s = clock_s
        self._uploads: dict[str, Upload] = {}
        # Counted by owner, with the files that are being written.
        self._num_bytes = Counter[str | None]()
        self._num_files = Counter[str | None]()

    async def add_upload(self, read: ReadPiece, *, filename: str, owner: str | None) -> Upload:
        """Stores the pieces that ``read`` returns, until it returns an empty one.

        Raises MediaError for an empty or too large file, UploadsFullError if there is no room,
        InvalidRequestError if uploads are turned off.
        """
        if self._max_bytes == 0:
            raise InvalidRequestError(
                "this server takes no uploads; send the video in a data: URL", param="file"
            )
        self._expire()
        video_id = f"video-{uuid.uuid4().hex}"
        path = self.folder / video_id
        num_bytes = 0
        self._num_files[owner] += 1
        try:
            self._check_room(self._num_files, owner, self._max_uploads, "uploads", "--max-uploads")
            with path.open("wb") as file:
                while piece := await read():
                    num_bytes += len(piece)
                    self._num_bytes[owner] += len(piece)
                    if num_bytes > self._max_file_bytes:
                        raise too_large("video", self._max_file_bytes, param="file")
                    self._check_room(
                        self._num_bytes, owner, self._max_bytes, "bytes", "--max-upload-bytes"
                    )
                    await asyncio.to_thread(file.write, piece)
            if num_bytes == 0:
                raise MediaError("the video is empty (0 bytes)", param="file")
        except BaseException as error:
            self._num_bytes[owner] -= num_bytes
            self._num_files[owner] -= 1
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UploadsFullError(
                    "the disk for uploads (--upload-dir) is full; delete some uploads or try again "
                    "when they have expired"
                ) from None
            raise
        now_s = self._clock_s()
        upload = Upload(video_id, filename, num_bytes, now_s, now_s + self._ttl_s, owner)
        self._uploads[video_id] = upload
        return upload

    def _check_room(
        self, used: Counter[str | None], owner: str | None, most: int, what: str, flag: str
    ) -> None:
        """Raises UploadsFullError if more than ``most`` is ``used``, or more than half by a key."""
        share = most if owner is None else most // 2
        is_theirs = used[owner] > share
        if is_theirs or used.total() > most:
            whose, limit = ("of this key ", share) if is_theirs else ("", most)
            raise UploadsFullError(
                f"the uploads kept here {whose}would exceed {limit} {what}, this server's limit "
                f"({flag}); delete some or try again when they have expired"
            )

    def get(self, video_id: str, owner: str | None) -> Upload:
        """Returns an upload. Raises NotFoundError if ``owner`` has none, or it has expired."""
        self._expire()
        upload = self._uploads.get(video_id)
        if upload is None or upload.owner != owner:
            raise NotFoundError(
                f"there is no uploaded video {video_id!r}: it has expired, was deleted or never was"
            )
        return upload

    @contextlib.contextmanager
    def keeping(self, urls: Collection[str]) -> Iterator[None]:
        """Keeps the files of the uploads among ``urls`` for the time of the ``with`` block, even if
        they expire or are deleted meanwhile."""
        used = [self._uploads[url] for url in set(urls) & self._uploads.keys()]
        for upload in used:
            upload.num_uses += 1
        try:
            yield
        finally:
            for upload in used:
                upload.num_uses -= 1
                self._remove_unused(upload)

    def delete(self, video_id: str, owner: str | None) -> None:
        """Deletes an upload. Raises NotFoundError as ``get`` does."""
        self._forget(self.get(video_id, owner))

    async def run(self) -> None:
        """Deletes expired uploads, until cancelled."""
        while True:
            await asyncio.sleep(min(60.0, self._ttl_s))
            self._expire()

    def close(self) -> None:
        """Deletes all uploads and their folder."""
        self._uploads.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _expire(self) -> None:
        now_s = self._clock_s()
        for upload in [each for each in self._uploads.values() if each.expires_s <= now_s]:
            self._forget(upload)

    def _forget(self, upload: Upload) -> None:
        del self._uploads[upload.video_id]
        self._remove_unused(upload)

    def _remove_unused(self, upload: Upload) -> None:
        """Removes the file of an upload that was forgotten, unless a request uses it."""
        if upload.num_uses or upload.video_id in self._uploads:
            return
        self._num_bytes[upload.owner] -= upload.num_bytes
        self._num_files[upload.owner] -= 1
        with contextlib.suppress(OSError):
            (self.folder / upload.video_id).unlink()


def _make_folder(parent: Path) -> tuple[Path, int]:
    """Returns a new folder in ``parent``, and the descriptor that has it locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)
        # Another gateway that started has deleted the folder, which was not locked yet.


def _delete_abandoned(parent: Path) -> None:
    """Deletes the folders of uploads in ``parent`` that no process has locked."""
    for folder in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # another user's, locked, or just deleted
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
