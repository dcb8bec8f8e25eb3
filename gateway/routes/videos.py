"""POST /v1/videos: a video is uploaded once and asked about several times."""

from __future__ import annotations

from fastapi import APIRouter, Request, UploadFile

from gateway.openapi import answers
from gateway.responses import VideoCard, VideoDeleted
from gateway.state import State
from gateway.uploads import Upload

router = APIRouter(prefix="/v1/videos", tags=["videos"])


@router.post("", responses=answers(400, 413, 507))
async def upload_video(file: UploadFile, request: Request, state: State) -> VideoCard:
    """Keeps a video for a while; its id can stand as the url of a video_url."""
    upload = await state.uploads.add(file.read, filename=file.filename or "", owner=_owner(request))
    return _card(upload)


@router.get("/{video_id}", responses=answers(404))
async def get_video(video_id: str, request: Request, state: State) -> VideoCard:
    """What is known of an uploaded video."""
    return _card(state.uploads.get(video_id, _owner(request)))


@router.delete("/{video_id}", responses=answers(404))
async def delete_video(video_id: str, request: Request, state: State) -> VideoDeleted:
    """Forgets an uploaded video before its time."""
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
