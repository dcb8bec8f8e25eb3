"""From an opened request to its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from hippo.engine.media_cache import Decoder
from hippo.engine.prompts import PromptReader
from hippo.errors import MediaError
from hippo.models.base import DecodedMedia
from hippo.types import ChatMessage, FramePlan, Media, MediaKind, MediaPart, OpenRequest
from tests.support.services import toy_request
from tests.support.toy_model import ToyDecoder, ToyModel


class OneWorker:
    """Decodes one item after the other; b"slow" takes for ever, b"bad" is refused."""

    def __init__(self) -> None:
        self.num_wanted = 0  # items that wait or are at work
        self._lock = asyncio.Lock()

    async def decode(self, media: Media, plan: FramePlan) -> DecodedMedia:
        self.num_wanted += 1
        try:
            async with self._lock:
                if media.data == b"bad":
                    raise MediaError("no video")
                if media.data.startswith(b"slow"):
                    await asyncio.Event().wait()
                return await ToyDecoder().decode(media, plan)
        finally:
            self.num_wanted -= 1


@pytest.fixture
def readers() -> Iterator[list[PromptReader]]:
    made: list[PromptReader] = []
    yield made
    for reader in made:
        reader.close()


def _request(*data: bytes) -> OpenRequest:
    parts = tuple(map(MediaPart, range(len(data))))
    media = tuple(Media(MediaKind.VIDEO, one) for one in data)
    return toy_request(messages=(ChatMessage("user", parts),), media=media)


def _reader(readers: list[PromptReader], decoder: Decoder) -> PromptReader:
    readers.append(PromptReader(ToyModel(), decoder))
    return readers[-1]


async def test_items_of_a_refused_request_are_decoded_no_further(
    readers: list[PromptReader],
) -> None:
    decoder = OneWorker()
    reader = _reader(readers, decoder)
    with pytest.raises(MediaError, match="no video"):
        await reader.read(_request(b"bad", *(b"slow%d" % i for i in range(7))))
    await asyncio.sleep(0)
    assert decoder.num_wanted == 0
    read = await asyncio.wait_for(reader.read(_request(b"toy:4")), 5)
    assert read.prompt.length == 16
