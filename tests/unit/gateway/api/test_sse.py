"""The chunks of a stream, byte for byte what clients parse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.sse import DONE, ChunkWriter

HEAD = {"id": "c-1", "created": 7, "model": "m"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4}


def _events(data: bytes) -> list[dict[str, Any]]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts if part != "data: [DONE]"]


def _writer(*, include_usage: bool = False) -> ChunkWriter:
    return ChunkWriter(HEAD, include_usage=include_usage)


@pytest.mark.parametrize("text", ["plain", 'a "quote" \\ {brace}', "line\nbreak", "日本 \u2028 🦛"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_text_chunk_carries_any_text(text: str, include_usage: bool) -> None:
    data = _writer(include_usage=include_usage).chunk(0, {"content": text})
    assert len(data.decode().splitlines()) == 2  # whatever a client takes for an end of line
    (event,) = _events(data)
    usage = {"usage": None} if include_usage else {}
    assert event == {
        **HEAD,
        "object": "chat.completion.chunk",
        **usage,
        "choices": [
            {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        ],
    }


def test_a_stream_ends_with_its_figures_then_its_usage() -> None:
    told = {"hippo": {"policy": "off"}, "metrics": {"m": 1}}
    writer = _writer(include_usage=True)
    data = writer.chunk(0, {}, finish_reason="length", token_ids=[5, 6], reports=told)
    data += writer.end_stream(usage=USAGE, metrics={"m": 1})
    assert data.endswith(DONE)
    last, usage = _events(data)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["token_ids"] == [5, 6]
    assert last["hippo"] == {"policy": "off"}
    assert last["usage"] is None
    assert usage["choices"] == []
    assert last["metrics"] == usage["metrics"] == {"m": 1}
    assert usage["usage"] == USAGE


def test_usage_is_left_out_unless_asked_for() -> None:
    data = _writer().chunk(0, {"content": "a"}) + _writer().end_stream(usage=USAGE, metrics={})
    assert data.endswith(DONE)
    (event,) = _events(data)
    assert "usage" not in event
