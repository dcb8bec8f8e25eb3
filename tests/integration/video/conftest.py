"""The decoder of these tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hippo.local_files import LocalFiles
from hippo.video.decoder import MediaDecoder
from hippo.video.limits import DecodeLimits


@pytest.fixture
async def decoder(tmp_path: Path) -> AsyncIterator[MediaDecoder]:
    """A decoder with small limits, so that tests can exceed them, which opens files of tmp_path."""
    limits = DecodeLimits(
        max_frames=64,
        max_pixels=1 << 20,
        max_duration_s=120.0,
        max_bytes=4 << 20,
        timeout_s=100.0,
        max_memory_bytes=256 << 20,
    )
    async with MediaDecoder(limits, files=LocalFiles([tmp_path])) as decoder:
        yield decoder
