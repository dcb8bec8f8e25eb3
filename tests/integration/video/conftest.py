"""The decoder of these tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hippo.video.decoder import MediaDecoder
from hippo.video.limits import DecodeLimits


@pytest.fixture
async def decoder() -> AsyncIterator[MediaDecoder]:
    """A decoder with small limits, so that tests can exceed them."""
    limits = DecodeLimits(
        max_frames=64,
        max_pixels=1 << 20,
        max_duration_s=120.0,
        max_bytes=4 << 20,
        timeout_s=100.0,
        max_memory_bytes=256 << 20,
    )
    async with MediaDecoder(limits) as decoder:
        yield decoder
