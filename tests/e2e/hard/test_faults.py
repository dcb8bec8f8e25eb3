"""Drafts that die or hang in mid-answer."""

import signal
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
