"""Reads a request's videos and images from data: URLs, http(s) URLs, paths and uploads."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gateway.config import GatewaySettings
from gateway.fetch import UrlFetcher
from gateway.uploads import Uploads, is_upload_id
from hippo.errors import ForbiddenError, InvalidRequestError, MediaError, NotFoundError
from hippo.tasks import gather_or_cancel
from hippo.types import Media, MediaKind
from hippo.video.frame_list import MAX_LISTED_FRAMES, pack_frames

_TOLERATED_TYPES = ("", "application/octet-stream")
_FRAMES_TYPE = "video/jpeg"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,15}):")


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """The times of a list of frames: ``indices`` (default 0, 1, 2, ...) over ``fps``.

    Without ``duration_s``, the last frame lasts as long as the others on average.
    """

    fps: float
    indices: tuple[int, ...] = ()
    duration_s: float | None = None

    def frame_seconds(self, num_frames: int) -> tuple[list[float], float]:
        """Returns the time of each frame, from 0, and the duration, in seconds.

        Raises InvalidRequestError if the indices or the duration do not fit the frames.
        """
        indices = self.indices or range(num_frames)
        if len(indices) != num_frames:
            raise InvalidRequestError(
                f"frames_indices has {len(indices)} entries, the video {num_frames} frames; "
                "one for each is needed",
                param="media_io_kwargs.video.frames_indices",
            )
        seconds = [(index - indices[0]) / self.fps for index in indices]
        if self.duration_s is None:
            mean = seconds[-1] / (num_frames - 1) if num_frames > 1 else 1 / self.fps
            return seconds, seconds[-1] + mean
        if self.duration_s <= seconds[-1]:
            raise InvalidRequestError(
                f"the video lasts {self.duration_s:g} s, but its last frame comes "
                f"{seconds[-1]:g} s after its first; give a longer duration or total_num_frames",
                param="media_io_kwargs.video.duration",
            )
        return seconds, self.duration_s


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One media item of a request; ``param`` is the path of the field that holds ``url``."""

    kind: MediaKind
    url: str
    param: str
    times: FrameTimes = FrameTimes(fps=1.0)  # used for a list of frames

    @property
    def is_frame_list(self) -> bool:
        """Whether the item is a video given as a data: URL of JPEG frames."""
        header = self.url[: len("data:") + len(_FRAMES_TYPE) + 1].lower()
        is_listed = header.startswith(f"data:{_FRAMES_TYPE}") and header[-1] in ";,"
        return self.kind is MediaKind.VIDEO and is_listed


class MediaReader:
    """Reads media within the operator's limits. Errors name the field at fault."""

    def __init__(self, settings: GatewaySettings, uploads: Uploads) -> None:
        self._fetcher = UrlFetcher(settings)
        self._uploads = uploads
        self._allowed_dirs = [Path(name).resolve() for name in settings.allowed_media_dirs]
        self._max_items = settings.max_media_items
        self._max_bytes = settings.max_media_bytes

    async def close(self) -> None:
        """Closes open connections."""
        await self._fetcher.close()

    async def read_media(
        self, sources: Sequence[MediaSource], *, owner: str | None = None
    ) -> tuple[Media, ...]:
        """Reads all items, in order; uploads must belong to ``owner``.

        Raises MediaError for an unreadable or too large item, ForbiddenError for a URL or path that
        is not allowed, NotFoundError for an unknown upload, InvalidRequestError for too many items.
        """
        if len(sources) > self._max_items:
            raise InvalidRequestError(
                f"the request has {len(sources)} videos and images; this server takes "
                f"{self._max_items}",
                param="messages",
            )
        if len(sources) == 1:
            return (await self._read_one(sources[0], owner),)
        return tuple(await gather_or_cancel(self._read_one(source, owner) for source in sources))

    async def _read_one(self, source: MediaSource, owner: str | None) -> Media:
        found = _SCHEME.match(source.url)
        scheme = found[1].lower() if found else ""
        try:
            if scheme == "data":
                data = await asyncio.to_thread(self._decode_data_url, source)
            elif scheme in ("http", "https"):
                data = await self._fetcher.fetch_url(source.url)
            elif is_upload_id(source.url) and source.kind is MediaKind.VIDEO:
                data = await self._uploads.read_upload(source.url, owner)
            elif scheme == "file" or source.url.startswith("/"):
                data = await asyncio.to_thread(self._read_path, source.url)
            else:
                raise MediaError(
                    f"{_shorten(source.url)!r} is no data: URL, no http(s) URL, no absolute "
                    "path and no id of an uploaded video"
                )
        except (InvalidRequestError, ForbiddenError, NotFoundError) as error:
            error.param = error.param or source.param
            raise
        if not data:
            raise MediaError(f"the {source.kind.value} is empty (0 bytes)", param=source.param)
        return Media(kind=source.kind, data=data)

    def _decode_data_url(self, source: MediaSource) -> bytes:
        header, comma, payload = source.url.partition(",")
        expected = f"data:{source.kind.value}/...;base64,..."
        if not comma:
            raise MediaError(f"the data: URL has no comma before its data; expected {expected}")
        media_type, *options = header[len("data:") :].split(";")
        if "base64" not in (option.strip().lower() for option in options):
            raise MediaError(f"the data: URL is not base64; expected {expected}")
        media_type = media_type.strip().lower()
        fits = media_type.startswith(f"{source.kind.value}/") or media_type in _TOLERATED_TYPES
        if not fits:
            raise MediaError(
                f"the data: URL holds {media_type!r}, in a {source.kind.value}_url; "
                f"expected {expected}"
            )
        # Clearly over the limit; the exact size is only known after decoding.
        if len(payload) // 4 * 3 > self._max_bytes * 1.1 + 64:
            raise self._too_large(source.kind.value)
        if "%" in payload:
            payload = unquote(payload)
        if source.is_frame_list:
            data = _frame_list(payload, source.times)
        else:
            data = _decode_base64(payload, "the data: URL")
        if len(data) > self._max_bytes:
            raise self._too_large(source.kind.value)
        return data

    def _too_large(self, noun: str) -> MediaError:
        return MediaError(f"the {noun} is larger than {self._max_bytes} bytes, this server's limit")

    def _read_path(self, url: str) -> bytes:
        if not self._allowed_dirs:
            raise ForbiddenError(
                "this server reads no local paths (the operator can allow directories with "
                "--allowed-media-dirs); send a data: URL"
            )
        path = url
        if not url.startswith("/"):
            try:
                parts = urlsplit(url)
            except ValueError as error:
                raise MediaError(f"{_shorten(url)!r} is malformed: {error}") from None
            if parts.netloc not in ("", "localhost"):
                raise ForbiddenError(f"{_shorten(url)!r} names another host; expected file:///path")
            path = unquote(parts.path)
        try:
            resolved = Path(path).resolve()
        except (OSError, RuntimeError, ValueError):  # link loops, null bytes
            raise MediaError(f"{_shorten(path)!r} is not a usable path") from None
        # Outside, a missing file is refused like an existing one: clients cannot probe for files.
        if not any(resolved.is_relative_to(directory) for directory in self._allowed_dirs):
            raise ForbiddenError(f"{_shorten(path)!r} is not under an allowed directory")
        return self._read_file(resolved, path)

    def _read_file(self, resolved: Path, shown: str) -> bytes:
        shown = _shorten(shown)
        try:
            # O_NONBLOCK: a FIFO must not block the thread. O_NOFOLLOW: links were resolved above.
            descriptor = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            raise MediaError(f"{shown!r} cannot be read: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MediaError(f"{shown!r} is not a regular file")
            if status.st_size > self._max_bytes:
                raise self._too_large(f"file {shown!r}")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(self._max_bytes)
        finally:
            os.close(descriptor)


def _frame_list(payload: str, times: FrameTimes) -> bytes:
    """Packs the frames of ``<jpg>,<jpg>,...`` (base64) into one file."""
    num_frames = payload.count(",") + 1
    if num_frames > MAX_LISTED_FRAMES:
        raise MediaError(
            f"the video has {num_frames} frames; at most {MAX_LISTED_FRAMES} can be sent"
        )
    seconds, duration_s = times.frame_seconds(num_frames)
    images = []
    for number, text in enumerate(payload.split(",")):
        image = _decode_base64(text, f"frame {number} of the video")
        if not image:
            raise MediaError(f"frame {number} of the video is empty (0 bytes)")
        images.append(image)
    return pack_frames(images, seconds, duration_s=duration_s)


def _decode_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name} is not valid base64: {error}") from None


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
