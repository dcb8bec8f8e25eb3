"""/v1/videos: a video is uploaded once, and several requests can ask about it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.api.form import FIELD, FormFile
from gateway.api.responses import VideoCard, VideoDeleted
from gateway.api.state import State
from gateway.media.uploads import Upload

router = APIRouter(prefix="/v1/videos", tags=["videos"])

_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {FIELD: {"type": "string", "format": "binary"}},
                    "required": [FIELD],
                }
            }
        },
    }
}


@router.post("", openapi_extra=_FORM)
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
