"""Readers that do not read; targets, drafts and gateways that are killed, held or stopped in
mid-answer."""

import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.support import (
    CHAT,
    Running,
    chat_body,
    chunks_of,
    data_url,
    further_gateway,
    plain_client,
    streamed,
    text_of,
    wait_until,
)
from tests.support.running.stack import fetch, value_of

pytestmark = pytest.mark.usefixtures("mended")

LONG = 3000  # tokens; an answer that is not over before a test has done what it does


def _send_slowly_read(reader: socket.socket, url: str, body: dict[str, Any]) -> None:
    """Asks with small buffers, so that what is not read is soon the gateway's to keep."""
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    reader.connect((httpx.URL(url).host, httpx.URL(url).port))
    reader.sendall(head.encode() + raw)


def test_a_reader_that_does_not_read_holds_no_slot(
    http: httpx.Client, running: Running, clip: Path
) -> None:
    whole = http.post(CHAT, json=chat_body(str(clip), 16)).json()
    expected = whole["choices"][0]["message"]["content"]
    # More to send than what buffers on the way take: two choices, an event a token, each of two
    # kilobytes.
    num_tokens = 150
    body = chat_body(
        str(clip),
        num_tokens,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=20,
        speculative={"policy": "off"},
    )
    with socket.socket() as reader:
        _send_slowly_read(reader, running.url, body)
        first = reader.recv(1)
        wait_until(lambda: running.slots_used() == 0)
        still_sent = running.gateway_metric("vllm:num_requests_running")
        again = http.post(CHAT, json=chat_body(str(clip), 4))
        with reader.makefile("rb") as rest:
            answer = first + rest.read()
    assert still_sent == 2  # choices; else the test was about nothing
    assert again.status_code == 200
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in answer.split(b"\r\n\r\n", 1)[1].splitlines()
        if line.startswith(b"data: {")
    ]
    for index in (0, 1):
        own = [
            event for event in events if event["choices"] and event["choices"][0]["index"] == index
        ]
        assert text_of(own).startswith(expected)
    assert events[-1]["usage"]["completion_tokens"] == 2 * num_tokens
    assert b"data: [DONE]" in answer


def test_a_reader_that_does_not_read_is_left_when_its_time_is_over(running: Running) -> None:
    with further_gateway(running, "--request-timeout-s", "2") as door, socket.socket() as reader:
        _send_slowly_read(reader, door.url, chat_body(None, LONG, stream=True))
        wait_until(lambda: _metric(door.url, "vllm:num_requests_running") == 1)
        wait_until(lambda: _metric(door.url, "vllm:num_requests_running") == 0)
        wait_until(lambda: running.slots_used() == 0)


def test_a_target_that_hangs_ends_the_answer_with_an_error(running: Running) -> None:
    target = running.stack.child("target")
    with further_gateway(running, "--services-silence-s", "2") as door, door.client() as client:
        chunks = streamed(client, chat_body(None, LONG), lambda: target.send_signal(signal.SIGSTOP))
        assert chunks[-1]["error"]["type"] == "unavailable_error"
        target.send_signal(signal.SIGCONT)
        wait_until(lambda: running.slots_used() == 0)
        wait_until(lambda: client.get("/ready").status_code == 200)
        assert client.post(CHAT, json=chat_body(None, 4)).status_code == 200


def test_a_target_that_is_killed_ends_every_answer_with_an_error(
    http: httpx.Client, running: Running, clip: Path
) -> None:
    target, answers = running.stack.child("target"), list[httpx.Response]()

    def ask(is_stream: bool) -> None:
        with plain_client(running.url) as client:
            answers.append(client.post(CHAT, json=chat_body(str(clip), 4, stream=is_stream)))

    asking = [threading.Thread(target=ask, args=(is_stream,)) for is_stream in (True, False)]

    def kill_it_with_two_waiting() -> None:
        target.send_signal(signal.SIGSTOP)  # so that two further prompts are not read
        for thread in asking:
            thread.start()
        wait_until(lambda: running.gateway_metric("vllm:num_requests_waiting") == 2)
        target.send_signal(signal.SIGKILL)

    chunks = streamed(http, chat_body(str(clip), LONG), kill_it_with_two_waiting)
    for thread in asking:
        thread.join()
    assert target.wait(20)
    assert chunks[-1]["error"]["type"] == "unavailable_error"
    answers.append(http.post(CHAT, json=chat_body(str(clip), 4)))
    assert [answer.status_code for answer in answers] == [503, 503, 503]
    assert all(answer.headers["retry-after"] for answer in answers)
    assert http.get("/ready").status_code == 503
    assert http.get("/health").status_code == 200
    running.stack.start_service("target")
    running.stack.wait_ready(timeout_s=60)
    assert http.post(CHAT, json=chat_body(str(clip), 40)).json()["hippo"]["draft_used"]


def test_a_gateway_that_is_killed_leaves_no_slot_behind(running: Running) -> None:
    body = chat_body(None, LONG, stream=True, speculative={"policy": "optimistic"})
    with further_gateway(running) as door, door.client() as client:
        with (
            pytest.raises(httpx.HTTPError),
            client.stream("POST", CHAT, json=body) as first,
            client.stream("POST", CHAT, json=body) as second,
        ):
            events = [chunks_of(response) for response in (first, second)]
            for each in events:
                next(each)
            wait_until(lambda: running.slots_used() == 4)
            door.child.send_signal(signal.SIGKILL)
            list(events[0])
        wait_until(lambda: running.slots_used() == 0)


def test_a_gateway_that_hangs_holds_slots_no_longer_than_its_requests_may_take(
    running: Running,
) -> None:
    body = chat_body(None, LONG, stream=True, speculative={"policy": "optimistic"})
    with further_gateway(running, "--request-timeout-s", "1") as door, door.client() as client:
        with client.stream("POST", CHAT, json=body) as response:
            events = chunks_of(response)
            next(events)
            door.child.send_signal(signal.SIGSTOP)
            wait_until(lambda: running.slots_used() == 0)
            door.child.send_signal(signal.SIGCONT)
            *_, last = events
        assert last["error"]["code"] == "timeout"
        whole = client.post(CHAT, json=chat_body(None, LONG))
        assert whole.status_code == 504
        wait_until(lambda: running.slots_used() == 0)


def test_a_gateway_that_is_stopped_finishes_its_answers(running: Running) -> None:
    with further_gateway(running) as door, door.client() as client:
        body = chat_body(None, 40)
        expected = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
        chunks = streamed(client, body, lambda: door.child.send_signal(signal.SIGTERM))
        assert text_of(chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert door.child.wait(20)
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


def test_a_gateway_that_waited_long_enough_says_so(running: Running) -> None:
    """The target is held still: two answers, one of them streamed, are not over in time."""
    target, lines, answers = running.stack.child("target"), list[str](), list[httpx.Response]()
    arguments = ("--shutdown-grace-s", "1", "--stream-keepalive-s", "0.1")
    with further_gateway(running, *arguments, lines=lines) as door, door.client() as client:

        def ask() -> None:
            answers.append(client.post(CHAT, json=chat_body(None, 4)))

        with client.stream("POST", CHAT, json=chat_body(None, LONG, stream=True)) as response:
            events = chunks_of(response)
            next(events)
            target.send_signal(signal.SIGSTOP)
            asking = threading.Thread(target=ask)
            asking.start()
            metric = "vllm:num_requests_waiting"
            wait_until(lambda: _metric(door.url, metric) == 1)
            door.child.send_signal(signal.SIGTERM)
            *_, last = events
        asking.join()
        assert door.child.wait(20)
    assert last["error"]["type"] == "unavailable_error"
    assert "stopping" in last["error"]["message"]
    assert answers[0].status_code == 503, (answers[0].text, lines)
    assert not any("Traceback" in line for line in lines)
    target.send_signal(signal.SIGCONT)
    wait_until(lambda: running.slots_used() == 0)


def _metric(url: str, line_start: str) -> float:
    return value_of(fetch(f"{url}/metrics").text, line_start)


def test_every_line_of_a_request_bears_its_id_on_all_three(
    http: httpx.Client, running: Running, clip: Path
) -> None:
    headers = {"x-request-id": "of-this-request-alone"}
    wait_until(lambda: running.slots_used() == 0)
    num_before = len(running.lines)
    answer = http.post(CHAT, json=chat_body(str(clip), 24), headers=headers)
    assert answer.headers["x-request-id"] == headers["x-request-id"]
    names = ("draft", "target", "gateway")
    wait_until(
        lambda: {line.partition(":")[0] for line in running.lines[num_before:]}.issuperset(names)
    )
    assert not [li for li in running.lines[num_before:] if headers["x-request-id"] not in li]
    refused = http.post(CHAT, json=chat_body(str(clip / "missing"), 4), headers=headers)
    assert refused.status_code >= 400
    assert refused.headers["x-request-id"] == headers["x-request-id"]


# More than the target alone gives while it is noticed that the draft is gone or hangs.
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def expected(running: Running) -> str:
    """The target's own answer about the clip."""
    body = chat_body(data_url(running.clip), NUM_TOKENS, speculative={"policy": "off"})
    with plain_client(running.url) as client:
        answer = client.post(CHAT, json=body).json()
    return str(answer["choices"][0]["message"]["content"])


def test_an_answer_survives_the_draft_and_takes_it_back(
    http: httpx.Client, running: Running, clip: Path, expected: str
) -> None:
    body = chat_body(data_url(clip), NUM_TOKENS, speculative={"policy": "optimistic"})
    draft, target = running.stack.child("draft"), running.stack.child("target")
    recoveries = running.gateway_metric("hippo_draft_recoveries_total")
    without: list[dict[str, Any]] = []

    def lose_the_draft() -> None:
        draft.send_signal(signal.SIGKILL)
        draft.wait(10)
        without.append(http.post(CHAT, json={**body, "max_tokens": 8}).json())
        # Held, so that the answer is not over before the draft is back.
        target.send_signal(signal.SIGSTOP)
        running.stack.start_service("draft")
        wait_until(lambda: running.metric("draft", "hippo_slots") == 2)
        target.send_signal(signal.SIGCONT)

    chunks = streamed(http, body, lose_the_draft)
    figures = chunks[-1]["hippo"]
    assert text_of(chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (figures["num_draft_losses"], figures["num_draft_streams"]) == (1, 2)
    assert running.gateway_metric("hippo_draft_recoveries_total") == recoveries + 1
    assert without[0]["hippo"]["draft_used"] is False
    assert without[0]["usage"]["completion_tokens"] == 8
    again = http.post(CHAT, json={**body, "max_tokens": 100}).json()
    assert again["hippo"]["draft_used"] is True
    assert expected.startswith(again["choices"][0]["message"]["content"])


def test_a_draft_that_hangs_is_given_up_until_it_is_well_again(
    running: Running, clip: Path, expected: str
) -> None:
    body = chat_body(data_url(clip), NUM_TOKENS, speculative={"policy": "serial"})
    draft, target = running.stack.child("draft"), running.stack.child("target")
    lines: list[str] = []
    stall = ("--draft-stall-s", "0.5")
    with further_gateway(running, *stall, lines=lines) as door, door.client() as client:
        drafted = running.metric("draft", "hippo_rows_total")
        with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
            chunks, is_held = [], False
            for chunk in chunks_of(response):
                chunks.append(chunk)
                if not is_held and running.metric("draft", "hippo_rows_total") > drafted:
                    is_held = True
                    draft.send_signal(signal.SIGSTOP)
                    # The request gives the draft up at a verdict, before the target is held.
                    wait_until(lambda: any("the draft stalled" in line for line in lines))
                    # Held, so that the answer is not over before the draft is back.
                    target.send_signal(signal.SIGSTOP)
                    draft.send_signal(signal.SIGCONT)
                    wait_until(lambda: _has_draft(client))
                    target.send_signal(signal.SIGCONT)
    figures = chunks[-1]["hippo"]
    assert text_of(chunks) == expected
    assert figures["draft_problem"] == "the draft stalled"
    assert (figures["num_draft_losses"], figures["num_draft_streams"]) == (1, 2)


def _has_draft(client: httpx.Client) -> bool:
    return bool(client.get("/ready").json().get("draft") == "ready")
