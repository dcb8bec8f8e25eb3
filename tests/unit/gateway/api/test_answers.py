"""POST /tokenize for a client that does not wait for it, and events as clients parse them."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException, Request

from gateway.api.routes.tokenize import TokenizeRequest, tokenize
from gateway.api.sse import event


async def test_the_work_for_a_client_that_leaves_ends() -> None:
    has_begun, has_ended = asyncio.Event(), False

    async def leaves() -> Any:
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def count_tokens(*_texts: Any, **_options: Any) -> None:
        nonlocal has_ended
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended = True

    target = SimpleNamespace(text_limit=SimpleNamespace(count_tokens=count_tokens))
    state: Any = SimpleNamespace(
        backends=SimpleNamespace(
            model=lambda _name: SimpleNamespace(name="m", max_context_length=512),
            pair=lambda _name: SimpleNamespace(target=target),
        ),
        text_threads=None,
    )
    request = Request({"type": "http"}, receive=leaves)
    with pytest.raises(HTTPException) as refused:
        await asyncio.wait_for(tokenize(TokenizeRequest(prompt="a"), request, state), 30)
    assert refused.value.status_code == 499 and has_ended


@pytest.mark.parametrize("text", ["plain", 'a "quote" \\ {brace}', "line\nbreak", "日本 \u2028 🦛"])
def test_an_event_carries_any_text(text: str) -> None:
    data = event({"content": text}).decode()
    assert len(data.splitlines()) == 2  # whatever a client takes for an end of line
    assert json.loads(data.removeprefix("data: ")) == {"content": text}
