"""The decoder of these tests."""

from collections.abc import AsyncIterator

import pytest_asyncio

from hippo.media.limits import DecodeLimits
from hippo.video.decoder import MediaDecoder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decoder() -> AsyncIterator[MediaDecoder]:
    """A decoder for all tests of a file, which run in the file's event loop; with small limits, so
    that they can exceed them."""
    sizes = {"max_frames": 64, "max_pixels": 1 << 20, "max_bytes": 4 << 20}
    sizes |= {"max_memory_bytes": 256 << 20}
    async with MediaDecoder(DecodeLimits(max_duration_s=120, timeout_s=100, **sizes)) as decoder:
        yield decoder
