"""The chunks of a stream, byte for byte what clients parse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.sse import DONE, ChunkWriter, Usage, choice_json, completion_json


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


def test_chunks_bear_the_index_of_their_choice() -> None:
    data = _writer().role(num_choices=2)
    data += _writer().text("b", index=1) + _writer().finish(
        index=1, finish_reason="stop", figures={}, metrics={}, token_ids=None
    )
    choices = [event["choices"][0] for event in _events(data)]
    assert [choice["index"] for choice in choices] == [0, 1, 1, 1]
    assert [choice["delta"].get("role") for choice in choices[:2]] == ["assistant"] * 2
    assert choice_json(index=3, text="", finish_reason="stop", token_ids=[1])["index"] == 3


def test_a_text_chunk_carries_its_tokens_log_probabilities() -> None:
    entry = {"token": "{", "logprob": -0.5, "bytes": [123], "top_logprobs": []}
    (event,) = _events(_writer().text("{", logprobs=(entry,)))
    assert event["choices"][0]["logprobs"] == {"content": [entry], "refusal": None}
    assert event["choices"][0]["delta"] == {"content": "{"}


def test_a_stream_ends_with_its_figures_then_its_usage() -> None:
    data = _writer(include_usage=True).finish(
        finish_reason="length", figures={"policy": "off"}, metrics={"m": 1}, token_ids=[5, 6]
    )
    data += _writer(include_usage=True).end(usage=Usage(3, 4, 2), metrics={"m": 1})
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


def test_every_chunk_bears_the_usage_so_far() -> None:
    writer, usage = _writer(include_usage=True), Usage(3, 4, 2)
    data = writer.role(usage) + writer.text("a", usage)
    data += writer.finish(finish_reason="stop", figures={}, metrics={}, token_ids=None, usage=usage)
    data += writer.end(usage=usage, metrics={})
    assert [event["usage"] for event in _events(data)] == [usage.to_json()] * 4


def test_usage_is_left_out_unless_asked_for() -> None:
    data = _writer().role() + _writer().finish(
        finish_reason="stop", figures={}, metrics={}, token_ids=None
    )
    data += _writer().end(usage=Usage(1, 1, 0), metrics={})
    assert data.endswith(DONE)
    assert all("usage" not in event for event in _events(data))


def test_a_whole_completion_has_openais_shape() -> None:
    answer = completion_json(
        completion_id="c-1",
        created=7,
        model="m",
        choices=[choice_json(text="Hi", finish_reason="stop", token_ids=None)],
        usage=Usage(1, 2, 0),
        figures={},
        metrics={},
    )
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "Hi"
