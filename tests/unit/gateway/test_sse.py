"""The chunks of a stream, byte for byte what clients parse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.sse import DONE, ChunkWriter, Usage, completion_json


def _events(data: bytes) -> list[dict[str, Any]]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts if part != "data: [DONE]"]


def _writer(*, include_usage: bool = False) -> ChunkWriter:
    return ChunkWriter(completion_id="c-1", created=7, model="m", include_usage=include_usage)


HEAD = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}


@pytest.mark.parametrize("text", ["plain", 'a "quote" \\ {brace}', "line\nbreak", "日本 \u2028 🦛"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_text_chunk_carries_any_text(text: str, include_usage: bool) -> None:
    (event,) = _events(_writer(include_usage=include_usage).text(text))
    usage = {"usage": None} if include_usage else {}
    assert event == {
        **HEAD,
        **usage,
        "choices": [
            {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        ],
    }


def test_a_text_chunk_carries_its_tokens_log_probabilities() -> None:
    entry = {"token": "{", "logprob": -0.5, "bytes": [123], "top_logprobs": []}
    (event,) = _events(_writer().text("{", logprobs=(entry,)))
    assert event["choices"][0]["logprobs"] == {"content": [entry], "refusal": None}
    assert event["choices"][0]["delta"] == {"content": "{"}


def test_a_stream_ends_with_its_figures_then_its_usage() -> None:
    data = _writer(include_usage=True).finish(
        finish_reason="length",
        usage=Usage(3, 4, 2),
        figures={"policy": "off"},
        metrics={"m": 1},
        token_ids=[5, 6],
    )
    assert data.endswith(DONE)
    last, usage = _events(data)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["token_ids"] == [5, 6]
    assert last["hippo"] == {"policy": "off"}
    assert last["usage"] is None
    assert usage["choices"] == []
    assert last["metrics"] == usage["metrics"] == {"m": 1}
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_usage_is_left_out_unless_asked_for() -> None:
    data = _writer().role() + _writer().finish(
        finish_reason="stop", usage=Usage(1, 1, 0), figures={}, metrics={}, token_ids=None
    )
    assert all("usage" not in event for event in _events(data))


def test_a_whole_completion_has_openais_shape() -> None:
    answer = completion_json(
        completion_id="c-1",
        created=7,
        model="m",
        text="Hi",
        finish_reason="stop",
        usage=Usage(1, 2, 0),
        figures={},
        metrics={},
        token_ids=None,
    )
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "Hi"
