"""The services know whose media they decode."""

from __future__ import annotations

import base64
from typing import Any

from gateway.common.config import GatewaySettings
from hippo.models.interface.base import DecodedMedia
from hippo.types import FramePlan, Media
from tests.support.models.toy_model import ToyDecoder, ToyModel
from tests.support.running.gateways import serving_gateway
from tests.support.running.services import serving_target, with_tokenizer

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}


class NotingDecoder(ToyDecoder):
    """Notes who asks for the items."""

    def __init__(self) -> None:
        self.clients: list[str] = []

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        self.clients.append(client)
        return await super().decode(media, plan, salt=salt, client=client)


def question(num_frames: int) -> dict[str, Any]:
    data = base64.b64encode(b"toy:%d" % num_frames).decode()
    video = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
    return {"model": "toy", "max_tokens": 2, "messages": [{"role": "user", "content": [video]}]}


async def test_the_decoder_knows_the_name_of_the_key() -> None:
    decoder = NotingDecoder()
    async with serving_target(with_tokenizer(ToyModel()), decoder) as (_, target):
        given = tuple(f"{name}={key}" for name, key in KEYS.items())
        settings = GatewaySettings(target=(target.address,), api_keys=given)
        async with serving_gateway(settings) as http:
            for number, key in enumerate(KEYS.values()):
                answer = await http.post(
                    "/v1/chat/completions",
                    json=question(2 + 2 * number),
                    headers={"authorization": f"Bearer {key}"},
                )
                answer.raise_for_status()
        async with serving_gateway(GatewaySettings(target=(target.address,))) as http:
            (await http.post("/v1/chat/completions", json=question(6))).raise_for_status()
    assert decoder.clients == ["alice", "bob", "address 127.0.0.1"]
