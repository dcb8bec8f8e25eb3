"""Reads a request's videos and images from data: URLs, http(s) URLs, paths and uploads.

A file on disk goes to the services by its path if they can open it, and otherwise as bytes. The
bytes of one request are limited to what one gRPC message may carry.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gateway.common.budget import Holding
from gateway.common.config import GatewaySettings
from gateway.media.fetch import UrlFetcher
from gateway.media.uploads import Uploads, is_upload_id, too_large
from hippo.base.local_files import LocalFiles, shorten
from hippo.base.tasks import gather_or_cancel
from hippo.base.tracing import span
from hippo.errors import ForbiddenError, InvalidRequestError, MediaError, NotFoundError
from hippo.media.frame_list import MAX_LISTED_FRAMES, MAX_LISTED_S, pack_frames
from hippo.types import Media, MediaKind

_FRAMES_TYPE = "video/jpeg"
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,15}):")
_BASE64 = re.compile(r";\s*base64\s*,", re.IGNORECASE)  # types may have commas before it
_MAX_HEADER_LENGTH = 1024  # a data: URL's
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_WHITE_SPACE = b" \t\r\n\f"


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """The times of a list of frames in the clip they come from, which lasts ``duration_s`` (None:
    unknown): ``indices`` (default 0, 1, 2, ...) over ``fps``."""

    fps: float
    indices: tuple[int, ...] = ()
    duration_s: float | None = None

    def frame_seconds(self, num_frames: int) -> tuple[list[float], float]:
        """Returns the time of each frame in the clip and the end of the last frame, in seconds; the
        last frame lasts as long as the others on average, or to the end of the clip.

        Raises InvalidRequestError if the indices or the duration do not fit the frames.
        """
        indices = self.indices or range(num_frames)
        if len(indices) != num_frames:
            raise InvalidRequestError(
                f"frames_indices has {len(indices)} entries, the video {num_frames} frames; "
                "one for each is needed",
                param="media_io_kwargs.video.frames_indices",
            )
        seconds = [index / self.fps for index in indices]
        first, last = seconds[0], seconds[-1]
        if last >= MAX_LISTED_S:
            raise InvalidRequestError(
                f"the last frame is {last:,.0f} s after the start of its video; frames up to "
                f"{MAX_LISTED_S:,.0f} s can be sent: give the video's own frame rate (fps)",
                param=f"media_io_kwargs.video.{'frames_indices' if self.indices else 'fps'}",
            )
        end = last + ((last - first) / (num_frames - 1) if num_frames > 1 else 1 / self.fps)
        if self.duration_s is None:
            return seconds, end
        if self.duration_s <= last:
            raise InvalidRequestError(
                f"the video lasts {self.duration_s:g} s, but its last frame is {last:g} s after "
                "its start; give a longer duration or total_num_frames, or the fps of "
                "frames_indices",
                param="media_io_kwargs.video.duration",
            )
        return seconds, min(end, self.duration_s)


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One media item of a request; ``param`` is the path of the field that holds ``url``."""

    kind: MediaKind
    url: str
    param: str
    times: FrameTimes = FrameTimes(fps=1.0)  # used for a list of frames
    uuid: str = ""  # the client's name of the content

    @property
    def is_frame_list(self) -> bool:
        """Whether the item is a video given as a data: URL of JPEG frames."""
        header = self.url.lstrip()[: len("data:") + len(_FRAMES_TYPE) + 1].lower()
        is_listed = header.startswith(f"data:{_FRAMES_TYPE}") and header[-1] in ";,"
        return self.kind is MediaKind.VIDEO and is_listed


class MediaReader:
    """Reads media within the operator's limits. Errors name the field at fault."""

    def __init__(self, settings: GatewaySettings, uploads: Uploads) -> None:
        self._fetcher = UrlFetcher(settings)
        self._uploads = uploads
        self._files = LocalFiles(settings.allowed_local_media_path)
        self._all_files = LocalFiles([*settings.allowed_local_media_path, uploads.folder])
        self._max_bytes = settings.max_media_bytes
        self._max_copied_bytes = settings.max_message_bytes

    async def close(self) -> None:
        await self._fetcher.close()

    async def read_media(
        self, sources: Sequence[MediaSource], holding: Holding, *, owner: str | None = None
    ) -> tuple[Media, ...]:
        """Reads all items, in order, into what a request holds; uploads must belong to ``owner``.
        Files are not read: their media have a path (see ``copy_files``).

        Raises MediaError for an unreadable or too large item, ForbiddenError for a URL or path that
        is not allowed, NotFoundError for an unknown upload.
        """
        take = self._counting(holding)

        async def read(source: MediaSource) -> Media:
            with span("read_media", attributes={"hippo.media_kind": source.kind.value}):
                return await self._read_one(source, owner, take)

        return tuple(await gather_or_cancel(map(read, sources)))

    async def copy_files(
        self,
        media: Sequence[Media],
        holding: Holding,
        open_dirs: Sequence[Collection[str]] = (),
    ) -> tuple[Media, ...]:
        """Returns the media with the bytes of each file that not every service can open.

        ``open_dirs`` has the directories of each service whose files the service opens itself; by
        default all files are copied. Raises MediaError for a file that is gone or too large for a
        message, with the item as ``param``.
        """
        take = self._counting(holding, sum(len(item.data) for item in media))
        copied = []
        for index, item in enumerate(media):
            path = Path(item.path)
            # The services have resolved the links of their directories, in their file systems.
            is_opened = bool(open_dirs) and all(
                any(path.is_relative_to(directory) for directory in directories)
                for directories in open_dirs
            )
            if item.path and not is_opened:
                try:
                    take(item.num_bytes)
                    data = await asyncio.to_thread(self._read_file, item)
                except MediaError as error:
                    raise MediaError(error.message, param=f"media[{index}]") from None
                item = replace(item, data=data, path="", num_bytes=0, modified_ns=0)
            copied.append(item)
        return tuple(copied)

    def _counting(self, holding: Holding, num_before: int = 0) -> Callable[[int], None]:
        """Returns a function that counts further bytes in memory, as held by the request, which has
        ``num_before``. It raises MediaError if one request may not have as many, MemoryFullError if
        there is no room for them beside other requests."""
        num_left = self._max_copied_bytes - num_before

        def take(num_bytes: int) -> None:
            nonlocal num_left
            num_left -= num_bytes
            if num_left < 0:
                raise MediaError(
                    f"the request's media take more than {self._max_copied_bytes} bytes, the most "
                    "that this server copies to its models for one request (--max-message-mib): "
                    "name a file in a directory that the services open themselves "
                    "(--allowed-local-media-path), or send less"
                )
            holding.take(num_bytes)

        return take

    async def _read_one(
        self, source: MediaSource, owner: str | None, take: Callable[[int], None]
    ) -> Media:
        scheme = ""
        if found := _SCHEME.match(source.url):
            scheme, source = found[1].lower(), replace(source, url=source.url.strip())
        try:
            if scheme == "data":
                data = await asyncio.to_thread(self._decode_data_url, source)
                take(len(data))
                media = Media(source.kind, data)
            elif scheme in ("http", "https"):
                media = Media(source.kind, await self._fetcher.fetch_url(source.url, take))
            elif is_upload_id(source.url) and source.kind is MediaKind.VIDEO:
                path = str(self._uploads.folder / self._uploads.get(source.url, owner).video_id)
                media = await asyncio.to_thread(self._find_file, source.kind, path, self._all_files)
            elif scheme == "file" or source.url.startswith("/"):
                path = self._allowed_path(source.url)
                media = await asyncio.to_thread(self._find_file, source.kind, path, self._files)
            else:
                raise MediaError(
                    f"{shorten(source.url)!r} is no data: URL, no http(s) URL, no absolute "
                    "path and no id of an uploaded video"
                )
            if not (media.data or media.num_bytes):
                raise MediaError(f"the {source.kind.value} is empty (0 bytes)")
        except (InvalidRequestError, ForbiddenError, NotFoundError) as error:
            error.param = error.param or source.param
            raise
        return replace(media, uuid=source.uuid)

    def _decode_data_url(self, source: MediaSource) -> bytes:
        mark = _BASE64.search(source.url, 0, _MAX_HEADER_LENGTH)
        if mark is None:
            problem = "is not base64" if "," in source.url else "has no comma before its data"
            if ";base64," in source.url:
                problem = f"has no ;base64, in its first {_MAX_HEADER_LENGTH:,} characters"
            raise MediaError(
                f"the data: URL {problem}; expected data:{source.kind.value}/...;base64,..."
            )
        payload = source.url[mark.end() :]
        # Clearly over the limit; the exact size is only known after decoding.
        if len(payload) // 4 * 3 > self._max_bytes * 1.1 + 64:
            raise too_large(source.kind.value, self._max_bytes)
        if "%" in payload:
            payload = unquote(payload)
        if source.is_frame_list:
            data = _frame_list(payload, source.times)
        else:
            data = _decode_base64(payload, "the data: URL")
        if len(data) > self._max_bytes:
            raise too_large(source.kind.value, self._max_bytes)
        return data

    def _allowed_path(self, url: str) -> str:
        """Returns the path of a path or file: URL; LocalFiles checks it."""
        if not self._files.directories:
            raise ForbiddenError(
                "this server reads no local paths (the operator can allow directories with "
                "--allowed-local-media-path); send a data: URL"
            )
        if url.startswith("/"):
            return url
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise MediaError(f"{shorten(url)!r} is malformed: {error}") from None
        if parts.netloc not in ("", "localhost"):
            raise ForbiddenError(f"{shorten(url)!r} names another host; expected file:///path")
        return unquote(parts.path)

    def _find_file(self, kind: MediaKind, path: str, files: LocalFiles) -> Media:
        with files.open_file(path) as file:
            if file.num_bytes > self._max_bytes:
                raise too_large(f"file {shorten(path)!r}", self._max_bytes)
            return Media(
                kind,
                path=str(file.path),
                num_bytes=file.num_bytes,
                modified_ns=file.modified_ns,
            )

    def _read_file(self, item: Media) -> bytes:
        """Returns the first ``num_bytes`` bytes of a file that ``_find_file`` has found."""
        with (
            self._all_files.open_file(item.path) as found,
            open(found.descriptor, "rb", closefd=False) as file,
        ):
            return file.read(item.num_bytes)


@dataclass(slots=True)
class CopiedFiles:
    """The media of one request with the bytes of their files, which are read once for all its
    choices."""

    reader: MediaReader
    media: tuple[Media, ...]
    holding: Holding
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self) -> tuple[Media, ...]:
        """Returns the media; raises as ``MediaReader.copy_files`` does."""
        async with self._reading:
            self.media = await self.reader.copy_files(self.media, self.holding)
            return self.media


def _frame_list(payload: str, times: FrameTimes) -> bytes:
    """Packs the frames of ``<jpg>,<jpg>,...`` (base64) into one file."""
    num_frames = payload.count(",") + 1
    if num_frames > MAX_LISTED_FRAMES:
        raise MediaError(
            f"the video has {num_frames} frames; at most {MAX_LISTED_FRAMES} can be sent"
        )
    seconds, end_s = times.frame_seconds(num_frames)
    images = []
    for number, text in enumerate(payload.split(",")):
        image = _decode_base64(text, f"frame {number} of the video")
        if not image:
            raise MediaError(f"frame {number} of the video is empty (0 bytes)")
        images.append(image)
    return pack_frames(images, seconds, end_s=end_s)


def _decode_base64(text: str, name: str) -> bytes:
    """Takes all forms that are in use: with line breaks, without padding, url-safe."""
    try:
        digits = text.encode("ascii").translate(_URL_SAFE, _WHITE_SPACE)
        if len(digits) % 4:
            digits = digits.rstrip(b"=")
            digits += b"=" * (-len(digits) % 4)
        return base64.b64decode(digits, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name} is not valid base64: {error}") from None
