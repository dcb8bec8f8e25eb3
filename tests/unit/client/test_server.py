"""Any server: its address, models and requests, and event streams with what is measured on them."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from hippo.client.answers import AnswerReader, error_message, read_answer
from hippo.client.requests import Question, RequestForm, probe
from hippo.client.server import Connection, Server, error_from
from hippo.errors import HippoError, InvalidRequestError, OverloadedError, UnavailableError
from tests.support.running.plain_server import PlainServer, serving

QUESTION = Question("hello", [{"role": "user", "content": "Hello?"}], seed=3)
FORM = RequestForm(model="plain")


def found_form(plain: PlainServer) -> RequestForm:
    with serving(plain), closing(Server(plain.url).connect()) as connection:
        return probe(connection, QUESTION, FORM)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://a:1", "/v1"),
        ("http://a:1/", "/v1"),
        ("https://a/v1", "/v1"),
        ("https://a/v1/", "/v1"),
        ("http://a/openai", "/openai/v1"),
    ],
)
def test_v1_is_put_behind_an_address_without_it(url: str, path: str) -> None:
    assert Server(url).path == path


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:port", "http://me:secret@a", ""]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="no server's address"):
        Server(url)


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(Server("http://a", api_key="secret"))


def test_a_server_that_is_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=r"did not answer within 0\.05 s"):
            Server(url, timeout_s=0.05).models()


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[Connection, list[bytes]]]:
    """A connection to a server that closes it after each answer, and the requests."""
    requests: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):  # the listener is shut down
            for answer in answers:
                client, _ = listener.accept()
                with client:
                    requests.append(client.recv(4096))
                    client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with closing(Server(url).connect()) as connection:
                yield connection, requests
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def response(content: bytes, head: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n" % (head, len(content)) + content


def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    with answering(response(b"{}"), response(b"{}")) as (connection, _):
        assert [connection.exchange("GET", path) for path in ("/a", "/b")] == [(200, b"{}")] * 2


def test_a_request_that_ends_a_server_is_sent_once() -> None:
    """The connection was closed on purpose, so the next one is new, and no idle one was lost."""
    closed = response(b"", b"connection: close\r\n")
    with answering(closed, b"", b"") as (connection, requests):
        assert connection.exchange("GET", "/a") == (200, b"")
        with pytest.raises(UnavailableError):
            connection.exchange("GET", "/b")
    assert len(requests) == 2


def test_a_key_may_have_letters_beyond_ascii_and_else_is_refused() -> None:
    Server("http://127.0.0.1:1", api_key="schlüssel").connect().close()
    with pytest.raises(InvalidRequestError, match="give the key in ASCII"):
        Server("http://127.0.0.1:1", api_key="ключ").connect()


def test_a_server_that_does_not_stream_is_told_apart() -> None:
    with answering(response(b'{"choices": []}')) as (connection, _):
        with pytest.raises(HippoError, match="did not stream"):
            connection.ask(b"{}")


def test_errors_have_the_class_of_their_status_and_the_servers_words() -> None:
    assert isinstance(error_from(429, b'{"error": {"message": "later"}}'), OverloadedError)
    assert error_from(429, b'{"error": {"message": "later"}}').message.endswith("429: later")
    assert type(error_from(500, b"oops")) is HippoError
    assert "no reason given" in error_from(503, b"").message


def test_an_error_of_the_reader_is_its_own_and_the_next_request_is_answered() -> None:
    def stop(piece: str, is_thought: bool) -> None:
        raise BrokenPipeError

    request = FORM.request(QUESTION).body()
    plain = PlainServer()
    with serving(plain), closing(Server(plain.url).connect()) as connection:
        with pytest.raises(BrokenPipeError):
            connection.ask(request, on_text=stop)
        assert connection.ask(request).text == "One and two."


def test_fields_that_a_server_refuses_are_left_out() -> None:
    form = found_form(PlainServer(unknown=("cache_salt", "seed", "stream_options")))
    assert form.optional == ()
    assert form.request(QUESTION).body() == form.request(QUESTION).body()
    form = found_form(PlainServer(unknown=("seed",)))
    assert form.optional == ("stream_options", "cache_salt")


def test_newer_models_are_given_their_name_of_the_budget() -> None:
    plain = PlainServer(newer=True)
    form = found_form(plain)
    assert form.budget_name == "max_completion_tokens"
    assert plain.bodies[-1]["max_completion_tokens"] == 8


def test_a_question_that_is_refused_ends_the_probe() -> None:
    with pytest.raises(InvalidRequestError, match="argument supplied: temperature"):
        found_form(PlainServer(unknown=("temperature",)))


def test_each_request_has_a_salt_of_its_own() -> None:
    request = FORM.request(QUESTION)
    assert request.has_salt and request.body() != request.body()


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
    deltas = (
        ({"reasoning": "h", "reasoning_content": "h"}, [1]),
        ({"reasoning_content": "m", "content": "y"}, [2]),
        ({"content": "es"}, [3]),
    )
    chunks = [event({"choices": [{"delta": each, "token_ids": ids}]}) for each, ids in deltas]
    usage = event({"usage": {"prompt_tokens_details": {"cached_tokens": 64}}})
    answer = read_answer([(1.0, b"".join([*chunks, usage, DONE]))], asked_s=0.0)
    assert (answer.text, answer.token_ids, answer.num_cached_tokens) == ("yes", (1, 2, 3), 64)
    assert (answer.thought, answer.piece_s) == ("hm", (1.0,) * 4)


def test_comments_carriage_returns_and_missing_spaces_are_read() -> None:
    reader = AnswerReader()
    assert reader.feed_data(b": keep-alive\r\n\r\n", 1.0) == []
    assert reader.feed_data(b'data:{"choices":[{"delta":{"content":"a"}}]}\r\n\r\n', 2.0) == [
        ("a", False)
    ]
    assert reader.feed_data(b'data: {"choices":[{"delta":null}]}\r\ndata: [DONE]\r\n', 3.0) == []
    assert reader.answer(0.0).piece_s == (2.0,)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (text("a") + event({"error": {"message": "it is gone"}}), HippoError, "it is gone"),
        (text("a"), UnavailableError, "broke off"),
        (b"data: <html>\n", HippoError, "an event that is no chat completion"),
        (b"data: [1]\n", HippoError, "an event that is no chat completion"),
    ],
)
def test_a_stream_that_is_no_answer_is_refused(
    data: bytes, kind: type[HippoError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read_answer([(1.0, data)], asked_s=0.0)


def test_errors_are_understood_in_the_forms_that_servers_use() -> None:
    for document in (
        {"error": {"message": "no"}}, {"error": "no"}, {"detail": "no"}, {"message": "no"},
    ):  # fmt: skip
        assert error_message(document) == "no"
    assert error_message([1]) is None
    assert error_message({"choices": []}) is None
