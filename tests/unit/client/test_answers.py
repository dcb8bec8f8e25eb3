"""Event streams of every kind of server, and what is measured on them."""

from __future__ import annotations

import json

import pytest

from hippo.client.answers import Answer, AnswerReader, error_message, read_answer
from hippo.errors import HippoError, UnavailableError

DONE = b"data: [DONE]\n\n"


def event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event({"choices": [{"delta": {"content": piece}}]})


def last(*token_ids: int) -> bytes:
    choice = {"delta": {}, "token_ids": token_ids, "finish_reason": "stop"}
    return event({"choices": [choice], "hippo": {"num_forwards": 1}})


def test_a_piece_has_the_time_of_the_bytes_that_complete_it() -> None:
    first, second = text("Hello"), text(" there") + last(1, 2, 3) + DONE
    answer = read_answer([(1.0, first[:9]), (2.0, first[9:]), (3.0, second)], asked_s=0.5)
    assert answer.piece_s == (2.0, 3.0)
    assert (answer.text, answer.token_ids) == ("Hello there", (1, 2, 3))
    assert (answer.finish_reason, answer.figures) == ("stop", {"num_forwards": 1})
    assert (answer.ttft_s, answer.end_to_end_s) == (1.5, 2.5)
    assert (answer.tpot_s, answer.gaps_s) == (0.5, [1.0])


def test_tokens_are_counted_by_ids_else_usage_else_pieces() -> None:
    pieces = [(1.0, text("a") + text("b"))]
    usage = event({"choices": [], "usage": {"completion_tokens": 5}})
    by_ids = read_answer([*pieces, (2.0, last(1, 2, 3) + usage + DONE)], asked_s=0.0)
    by_usage = read_answer([*pieces, (2.0, usage + DONE)], asked_s=0.0)
    by_pieces = read_answer([*pieces, (2.0, DONE)], asked_s=0.0)
    assert [(a.counted_by, a.num_tokens) for a in (by_ids, by_usage, by_pieces)] == [
        ("ids", 3), ("usage", 5), ("pieces", 2),
    ]  # fmt: skip


def test_chunks_may_have_token_ids_of_their_own_cached_tokens_and_reasoning() -> None:
    chunks = [
        event({"choices": [{"delta": {field: piece}, "token_ids": ids}]})
        for field, piece, ids in (("reasoning_content", "hm", [1]), ("content", "yes", [2, 3]))
    ]
    usage = event({"usage": {"prompt_tokens_details": {"cached_tokens": 64}}})
    answer = read_answer([(1.0, b"".join([*chunks, usage, DONE]))], asked_s=0.0)
    assert (answer.text, answer.token_ids, answer.num_cached_tokens) == ("hmyes", (1, 2, 3), 64)


def test_comments_carriage_returns_and_missing_spaces_are_read() -> None:
    reader = AnswerReader()
    assert reader.feed_data(b": keep-alive\r\n\r\n", 1.0) == []
    assert reader.feed_data(b'data:{"choices":[{"delta":{"content":"a"}}]}\r\n\r\n', 2.0) == ["a"]
    assert reader.feed_data(b'data: {"choices":[{"delta":null}]}\r\ndata: [DONE]\r\n', 3.0) == []
    assert reader.answer(0.0).piece_s == (2.0,)


def test_decoding_is_timed_by_a_gateways_clock_else_the_clients() -> None:
    figures = {"timings_ms": {"decode": 600.0}}
    gateway = Answer(text="", asked_s=0.0, piece_s=(1, 1.5), token_ids=(1, 2, 3), figures=figures)
    plain = Answer(text="", asked_s=0.0, piece_s=(1, 1.5))
    assert (gateway.decode_s, plain.decode_s) == (0.6, 0.5)
    assert gateway.decode_s_per_token == pytest.approx(0.3)


def test_an_error_in_the_stream_is_raised() -> None:
    broken = text("a") + event({"error": {"message": "the draft is gone"}})
    with pytest.raises(HippoError, match="the draft is gone"):
        read_answer([(1.0, broken)], asked_s=0.0)


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    with pytest.raises(UnavailableError, match="broke off"):
        read_answer([(1.0, text("a"))], asked_s=0.0)


@pytest.mark.parametrize("data", [b"data: <html>\n", b"data: [1]\n"])
def test_events_of_another_kind_are_refused(data: bytes) -> None:
    with pytest.raises(HippoError, match="an event that is no chat completion"):
        read_answer([(1.0, data)], asked_s=0.0)


def test_errors_are_understood_in_the_forms_that_servers_use() -> None:
    for document in (
        {"error": {"message": "no"}}, {"error": "no"}, {"detail": "no"}, {"message": "no"},
    ):  # fmt: skip
        assert error_message(document) == "no"
    assert error_message([1]) is None
    assert error_message({"choices": []}) is None
