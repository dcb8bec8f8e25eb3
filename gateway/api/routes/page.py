"""The web page at /, and the sample videos that it offers."""

from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from pydantic import Field

from gateway.answer.figures import Described
from gateway.api.state import GatewayState, State
from hippo.errors import NotFoundError
from hippo.page import POLICY, page_file

router = APIRouter()

_MEDIA_TYPES = {
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".mov": "video/quicktime",
    ".webm": "video/webm",
    ".mkv": "video/x-matroska",
}
_HEADERS = {"content-security-policy": POLICY, "cache-control": "no-cache"}
_VIDEO: Any = {200: {"content": {"video/*": {"schema": {"type": "string", "format": "binary"}}}}}


class SampleCard(Described):
    """A sample video."""

    name: str = Field(examples=["handful.mp4"])
    bytes: int


class SampleList(Described):
    """The operator's sample videos."""

    object: Literal["list"] = "list"
    data: list[SampleCard]


@router.get("/", include_in_schema=False)
async def index() -> Response:
    """Returns the page."""
    return await asset("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def asset(name: str) -> Response:
    """Returns a script, the style sheet or the picture of the page."""
    found = page_file(name)
    if found is None:
        raise NotFoundError(f"the page has no file {name!r}")
    content, media_type = found
    return Response(content, media_type=media_type, headers=_HEADERS)


@router.get("/v1/samples", tags=["videos"])
def list_samples(state: State) -> SampleList:
    """Lists the operator's sample videos."""
    paths = _samples(state)
    return SampleList(
        data=[SampleCard(name=each.name, bytes=each.stat().st_size) for each in paths]
    )


@router.get("/v1/samples/{name}", response_class=FileResponse, responses=_VIDEO, tags=["videos"])
def get_sample(name: str, state: State) -> FileResponse:
    """Returns a sample video."""
    for path in _samples(state):
        if path.name == name:
            return FileResponse(path, media_type=_MEDIA_TYPES[path.suffix.lower()])
    raise NotFoundError(f"there is no sample video {name!r}")


def _samples(state: GatewayState) -> list[Path]:
    """Returns the samples by name; none without a folder, or if it is gone."""
    folder = state.settings.page_samples
    found = Path(folder).glob("*") if folder else ()
    return sorted(each for each in found if each.suffix.lower() in _MEDIA_TYPES and each.is_file())
