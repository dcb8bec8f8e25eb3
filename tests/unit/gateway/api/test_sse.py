"""The events of a stream, byte for byte what clients parse."""

from __future__ import annotations

import json

import pytest

from gateway.api.sse import event


@pytest.mark.parametrize("text", ["plain", 'a "quote" \\ {brace}', "line\nbreak", "日本 \u2028 🦛"])
def test_an_event_carries_any_text(text: str) -> None:
    data = event({"content": text}).decode()
    assert len(data.splitlines()) == 2  # whatever a client takes for an end of line
    assert json.loads(data.removeprefix("data: ")) == {"content": text}
