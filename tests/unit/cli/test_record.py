"""The pictures of a recording."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from hippo.cli.record import pictures
from tests.support.clips import video


@pytest.mark.parametrize("container", ["mp4", "mpegts"])  # a transport stream does not start at 0
def test_pictures_are_those_of_the_seconds_after_the_first_frame(
    tmp_path: Path, container: str
) -> None:
    clip = video(container=container)
    path = tmp_path / "clip"
    path.write_bytes(clip.data)
    seen: list[int] = []
    for url in pictures(str(path), [0.0, 0.5, 1.25]):
        with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
            level = image.convert("L").getpixel((image.width // 2, image.height // 2))
        assert isinstance(level, int)
        seen.append(round((level - 40) / 12))
    assert seen == [0, 4, 10]
