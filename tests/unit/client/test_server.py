"""Addresses, models and requests, against a real HTTP server on a port of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from hippo.client.requests import Question, RequestForm, probe
from hippo.client.server import Connection, Server, error_from
from hippo.errors import (
    ForbiddenError,
    HippoError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
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


def test_models_are_listed_with_the_key() -> None:
    with serving(PlainServer(models=("a", "b"), api_key="secret")) as plain:
        assert Server(plain.url, api_key="secret").models() == ["a", "b"]
        with pytest.raises(ForbiddenError, match="401: Incorrect API key"):
            Server(plain.url).models()


def test_a_server_that_is_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=r"did not answer within 0\.05 s"):
            Server(url, timeout_s=0.05).models()


@contextmanager
def closing_after_each(content: bytes, *, num_answers: int) -> Iterator[Connection]:
    """A connection to a server that closes it after each answer."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(content) + content

    def serve(listener: socket.socket) -> None:
        for _ in range(num_answers):
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with closing(Server(url).connect()) as connection:
            yield connection
        thread.join()


def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    with closing_after_each(b"{}", num_answers=2) as connection:
        assert [connection.exchange("GET", path) for path in ("/a", "/b")] == [(200, b"{}")] * 2


def test_a_server_that_does_not_stream_is_told_apart() -> None:
    with (
        closing_after_each(b'{"choices": []}', num_answers=1) as connection,
        pytest.raises(HippoError, match="did not stream"),
    ):
        connection.ask(b"{}")


def test_errors_have_the_class_of_their_status_and_the_servers_words() -> None:
    assert isinstance(error_from(429, b'{"error": {"message": "later"}}'), OverloadedError)
    assert error_from(429, b'{"error": {"message": "later"}}').message.endswith("429: later")
    assert type(error_from(500, b"oops")) is HippoError
    assert "no reason given" in error_from(503, b"").message


def test_a_plain_server_is_asked_for_nothing_of_ours() -> None:
    plain = PlainServer()
    form = found_form(plain)
    assert not form.is_hippo
    assert form.optional == ("stream_options", "seed", "cache_salt")
    (body,) = plain.bodies
    assert set(body) == {
        "model", "messages", "max_tokens", "temperature", "stream", *form.optional,
    }  # fmt: skip
    assert (body["seed"], body["max_tokens"]) == (3, 8)


def test_an_error_of_the_reader_is_its_own_and_the_next_request_is_answered() -> None:
    def stop(piece: str) -> None:
        raise BrokenPipeError

    request = FORM.request(QUESTION).body()
    plain = PlainServer()
    with serving(plain), closing(Server(plain.url).connect()) as connection:
        with pytest.raises(BrokenPipeError):
            connection.ask(request, on_text=stop)
        assert connection.ask(request).text == "One and two."


def test_a_gateway_is_known_by_its_figures() -> None:
    form = found_form(PlainServer(figures={"timings_ms": {"decode": 1.0}}))
    assert form.is_hippo
    request = form.request(QUESTION, {"policy": "off"})
    assert b'"speculative": {"policy": "off"}' in request.body()
    assert b'"return_token_ids": true' in request.body()


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
