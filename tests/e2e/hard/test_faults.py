"""Clients that leave, drafts that die, queues that fill."""

from __future__ import annotations

import signal
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

pytestmark = pytest.mark.usefixtures("mended")

# More than the target alone gives while it is noticed that the draft is gone or hangs.
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def expected(running: Running) -> str:
    """The target's own answer about the clip."""
    body = chat_body(data_url(running.clip), NUM_TOKENS, speculative={"policy": "off"})
    with plain_client(running.url) as client:
        answer = client.post(CHAT, json=body).json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_frees_the_slots(
    http: httpx.Client, running: Running, clip: Path, is_stream: bool
) -> None:
    body = chat_body(data_url(clip), 3000, stream=is_stream, speculative={"policy": "optimistic"})
    cancelled = 'hippo_completions_total{outcome="cancelled",policy="optimistic"}'
    before = running.gateway_metric(cancelled)
    if is_stream:
        with http.stream("POST", CHAT, json=body) as response:
            chunks = chunks_of(response)
            for _ in range(4):
                next(chunks)
            assert running.slots_used() == 2
    else:
        impatient = httpx.Timeout(60, read=0.7)
        with pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=body, timeout=impatient)
    wait_until(lambda: running.slots_used() == 0)
    assert running.gateway_metric(cancelled) == before + 1


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


def test_more_requests_than_slots_and_queue_are_turned_away(
    http: httpx.Client, running: Running, clip: Path
) -> None:
    statuses: list[int] = []
    body = chat_body(data_url(clip), 3000, stream=True)
    leave = threading.Event()

    def ask() -> None:
        with (
            plain_client(running.url) as client,
            client.stream("POST", CHAT, json=body) as response,
        ):
            statuses.append(response.status_code)
            if response.status_code == 200:
                for _ in chunks_of(response):
                    if leave.is_set():
                        break

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: running.metric("target", "hippo_slots_used") == 2)
    waiting = [threading.Thread(target=ask) for _ in range(2)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: running.metric("target", "hippo_queue_length") == 2)
    refused = http.post(CHAT, json=body)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "overloaded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    leave.set()
    for thread in threads + waiting:
        thread.join()
    assert statuses == [200] * 4
    wait_until(lambda: running.slots_used() == 0)
