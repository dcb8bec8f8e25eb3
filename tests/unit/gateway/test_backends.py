"""What the gateway says of the two services it finds."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gateway.backends import Backends
from tests.support.services import serving_draft, serving_target
from tests.support.toy_model import ToyModel


def _model_on(*device_uuids: str) -> ToyModel:
    model = ToyModel()
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    model._info = dataclasses.replace(
        model.info, tokenizer_json=tokenizer.to_str().encode(), device_uuids=device_uuids
    )
    return model


@pytest.mark.parametrize(
    ("draft", "target", "shared"),
    [
        (("gpu-a",), ("gpu-a",), "gpu-a"),
        (("gpu-b",), ("gpu-a", "gpu-b"), "gpu-b"),
        (("gpu-a",), ("gpu-b",), None),
        ((), (), None),  # on a CPU nothing is known
    ],
)
async def test_a_pair_that_shares_a_gpu_is_warned_about(
    draft: tuple[str, ...],
    target: tuple[str, ...],
    shared: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        serving_draft(_model_on(*draft)) as (_, draft_client),
        serving_target(_model_on(*target)) as (_, target_client),
    ):
        backends = Backends(target_client, draft_client)
        with caplog.at_level(logging.WARNING, "gateway.backends"):
            await backends.start()
            await asyncio.wait_for(backends.wait_draft(), 30)
            await backends.close()
    warned = [record.getMessage() for record in caplog.records if "one GPU" in record.getMessage()]
    assert len(warned) == (shared is not None)
    assert all(f"({shared})" in message for message in warned)
