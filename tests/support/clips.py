"""Real media whose frames can be told apart once they are decoded."""

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hippo.errors import MediaError
from hippo.models.interface.base import DecodedMedia
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import encode

_NUM_STEPS = 16


def picture(number: int, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A grey frame whose level tells ``number``, with a red top left corner."""
    level = 40 + 12 * (number % _NUM_STEPS)
    pixels = np.full((height, width, 3), level, dtype=np.uint8)
    pixels[: height // 4, : width // 4] = (230, 20, 20)
    return pixels


def numbers(media: DecodedMedia) -> list[int]:
    """The ``number`` modulo 16 that each decoded frame shows in its middle."""
    _, height, width, _ = media.frames.shape
    rows, columns = (slice(3 * size // 8, 5 * size // 8) for size in (height, width))
    middles = media.frames[:, rows, columns].float().mean((1, 2, 3))
    return [round((level - 40) / 12) for level in middles.tolist()]


def video(
    num_frames: int = 16,
    *,
    container: str = "mp4",
    codec: str = "libx264",
    fps: Fraction | int = 8,
    width: int = 64,
    height: int = 64,
    **options: Any,
) -> Media:
    """A clip whose frame i shows ``picture(i)``; the options are those of ``encode``."""
    size: dict[str, Any] = {"num_frames": num_frames, "fps": fps, "width": width, "height": height}
    return Media(MediaKind.VIDEO, encode(container, codec, paint=picture, **size, **options))


def image(kind: str, *, width: int = 40, height: int = 20, **options: Any) -> Media:
    """``picture(3)`` as a file of the kind."""
    buffer = io.BytesIO()
    Image.fromarray(picture(3, width, height)).save(buffer, kind, **options)
    return Media(MediaKind.IMAGE, buffer.getvalue())


def at_path(path: Path) -> Media:
    """A video that is named by its path."""
    status = path.stat()
    return Media(
        MediaKind.VIDEO,
        path=str(path),
        num_bytes=status.st_size,
        modified_ns=status.st_mtime_ns % 2**64,
    )


async def refusal(decoder: MediaDecoder, media: Media, plan: FramePlan | None = None) -> str:
    """The message of the MediaError; nothing dies of it."""
    pid = decoder.worker_pids[0]
    with pytest.raises(MediaError) as caught:
        await decoder.decode(media, plan or FramePlan())
    assert decoder.worker_pids[0] == pid
    return caught.value.message
