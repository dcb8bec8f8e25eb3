"""A file or a URL as a part of a question."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path
from typing import Any

from hippo.errors import InvalidRequestError

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def media_part(video: str) -> dict[str, Any]:
    """A content part for a file on this machine (sent whole) or a URL (fetched there).

    Raises InvalidRequestError for a file that cannot be read.
    """
    suffix = Path(video).suffix.lower()
    kind = "image" if suffix in _IMAGE_SUFFIXES else "video"
    url = video
    if not video.startswith(("http://", "https://", "data:", "file://")):
        try:
            data = Path(video).expanduser().read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{video} cannot be read: {error.strerror}") from None
        media_type = mimetypes.guess_type(video)[0] or ""
        if not media_type.startswith(kind + "/"):
            media_type = f"{kind}/mp4" if kind == "video" else f"{kind}/jpeg"
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
