"""/v1/videos: a video is uploaded once, and several requests can ask about it."""

from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from gateway.api.responses import VideoCard, VideoDeleted
from gateway.api.state import State
from gateway.media.uploads import Upload
from hippo.errors import InvalidRequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

router = APIRouter(prefix="/v1/videos", tags=["videos"])

FIELD = "file"
_FILE = {"type": "string", "format": "binary"}
_SCHEMA = {"type": "object", "properties": {FIELD: _FILE}, "required": [FIELD]}
_FORM = {"required": True, "content": {"multipart/form-data": {"schema": _SCHEMA}}}
_MOST_PARTS = 64  # each takes the parser as long as some kilobytes of a file


@router.post("", openapi_extra={"requestBody": _FORM})
async def upload_video(request: Request, state: State) -> VideoCard:
    """Stores a video until it expires; requests can name its id as the url of a video_url."""
    form = FormFile(request.headers.get("content-type", ""), request.stream())
    upload = await state.uploads.add_upload(
        form.read_piece, filename=await form.read_head(), owner=_owner(request)
    )
    return _card(upload)


@router.get("/{video_id}")
async def get_video(video_id: str, request: Request, state: State) -> VideoCard:
    """Returns the facts about an uploaded video."""
    return _card(state.uploads.get(video_id, _owner(request)))


@router.delete("/{video_id}")
async def delete_video(video_id: str, request: Request, state: State) -> VideoDeleted:
    """Deletes an uploaded video before it expires."""
    state.uploads.delete(video_id, _owner(request))
    return VideoDeleted(id=video_id)


def _owner(request: Request) -> str | None:
    key = request.state.key
    return None if key is None else key.name


def _card(upload: Upload) -> VideoCard:
    return VideoCard(
        id=upload.video_id,
        bytes=upload.num_bytes,
        created_at=int(upload.created_s),
        expires_at=int(upload.expires_s),
        filename=upload.filename,
    )


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=FIELD)


class FormFile:
    """The field ``file`` of a form, read from the pieces of a request's ``body``, so that a large
    one is stored only once; other fields are skipped. ``read_head`` comes first, then
    ``read_piece`` until it returns an empty piece."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes]) -> None:
        """Raises InvalidRequestError for a body of another type."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise _refusal(
                f"the content type is {content_type or 'missing'!r}; expected multipart/form-data "
                f"with the video in the field {FIELD!r}"
            )
        self._body = body
        self._pieces: deque[bytes] = deque()
        self._name: str | None = None  # the file's, once its head has come
        self._is_file = False  # whether the part being read is the file
        self._has_ended = False
        self._num_parts = 0
        self._header = (bytearray(), bytearray())  # name and value
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._on_header_end,
            "on_part_data": self._on_part_data,
            "on_end": self._on_end,
        }
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)
        except (FormParserError, UnicodeError) as error:
            raise _refusal(f"the form's boundary cannot be used: {error}") from None

    async def read_head(self) -> str:
        """Returns the file's name; raises InvalidRequestError for a form without the file."""
        while self._name is None and await self._parse_next():
            pass
        if self._name is None:
            raise _refusal(f"the form has no file in the field {FIELD!r}")
        return self._name

    async def read_piece(self) -> bytes:
        """Returns the file's next bytes, and b"" at its end.

        Raises InvalidRequestError for a malformed form.
        """
        while not self._pieces:
            if not await self._parse_next():
                return b""
        return self._pieces.popleft()

    async def _parse_next(self) -> bool:
        """Returns False at the body's end."""
        try:
            piece = await anext(self._body, None)
            if piece is not None:
                self._parser.write(piece)
            elif not self._has_ended:
                raise ClientDisconnect
        except ClientDisconnect:
            raise _refusal("the form is cut off; send it whole") from None
        except MultipartParseError as error:
            raise _refusal(f"the form is malformed: {error}") from None
        return piece is not None

    def _on_part_begin(self) -> None:
        self._is_file = False
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise _refusal(f"the form has more than {_MOST_PARTS} parts; send the video alone")

    def _on_header_end(self) -> None:
        name, value = map(bytes, self._header)
        self._header = (bytearray(), bytearray())
        if name.lower() != b"content-disposition" or self._name is not None:
            return
        _, options = parse_options_header(value)
        if options.get(b"name") == FIELD.encode() and b"filename" in options:
            self._is_file = True
            self._name = options[b"filename"].decode(errors="replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file and end > start:
            self._pieces.append(data[start:end])

    def _on_end(self) -> None:
        self._has_ended = True
