"""One gateway before two targets and a draft that serves both."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hippo.cli.processes import Child
from tests.e2e.support import (
    CHAT,
    Running,
    chat_body,
    data_url,
    free_port,
    further_gateway,
    plain_client,
    process,
    readiness,
    streamed,
    text_of,
    video_message,
    wait_until,
    write_clip,
)
from tests.support.running.stack import fetch


@dataclass
class Several:
    """The gateway, and the target that is not the stack's own."""

    url: str
    other: Child
    other_address: str

    def ask(self, **fields: Any) -> httpx.Response:
        body = chat_body(None, 16, **fields)
        with plain_client(self.url) as client:
            return client.post(CHAT, json=body)

    def num_targets_up(self) -> int:
        ready = readiness(self.url)
        return 0 if ready is None else int(ready["num_targets"]["up"])

    def services(self) -> dict[str, dict[str, Any]]:
        (card,) = fetch(f"{self.url}/v1/models").json()["data"]
        return {service["id"]: service for service in card["hippo"]["services"]}


@pytest.fixture(scope="module")
def several(running: Running, pair: dict[str, str]) -> Iterator[Several]:
    port = str(free_port())
    arguments = (
        "--port", port,
        "--model", pair["target"],
        "--served-name", "hippo",
        "--dtype", "float32",
        "--slots", "2",
        "--max-context-length", str(running.max_context_length),
        "--num-threads", "1",
    )  # fmt: skip
    other_address = f"127.0.0.1:{port}"
    targets = f"127.0.0.1:{running.stack.port('target')},{other_address}"
    options = ("--target", targets, "--services-silence-s", "4")
    with (
        process("services.target", *arguments) as other,
        further_gateway(running, *options) as door,
    ):
        found = Several(door.url, other, other_address)
        wait_until(lambda: found.num_targets_up() == 2)
        yield found


def test_clips_are_shared_out_and_each_stays_where_it_is(
    several: Several, running: Running, tmp_path: Path
) -> None:
    before = running.metric("target", "hippo_sequences_total")
    urls = [
        data_url(write_clip(tmp_path / f"{number}.mp4", num_frames=8 + number))
        for number in range(8)
    ]
    was_drafted = []
    for url in urls:
        first = several.ask(messages=[video_message(url)]).raise_for_status().json()
        again = several.ask(messages=[video_message(url)]).raise_for_status().json()
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        was_drafted.append(first["hippo"]["draft_used"])
    assert any(
        was_drafted
    )  # not all: on a busy machine a short answer may end before the draft begins
    num_here = running.metric("target", "hippo_sequences_total") - before
    assert 0 < num_here < 16 and num_here % 2 == 0


def test_answers_are_those_of_one_target(several: Several, running: Running) -> None:
    body = {"messages": [video_message(data_url(running.clip))], "temperature": 0.8, "seed": 3}
    answers = [several.ask(**body, cache_salt=str(number)).json() for number in range(4)]
    with plain_client(running.url) as client:
        alone = client.post(CHAT, json=chat_body(None, 16, **body)).json()
    texts = {answer["choices"][0]["message"]["content"] for answer in [*answers, alone]}
    assert len(texts) == 1


def test_a_target_that_is_gone_is_left_out_and_taken_back(
    several: Several, running: Running
) -> None:
    several.other.send_signal(signal.SIGSTOP)
    wait_until(lambda: several.num_targets_up() == 1)
    several.other.send_signal(signal.SIGCONT)
    wait_until(lambda: several.num_targets_up() == 2)


def test_a_target_that_is_stopped_finishes_its_answers_and_is_left_out(
    several: Several, running: Running
) -> None:
    body = chat_body(data_url(running.clip), 80)
    with (
        further_gateway(running, "--target", several.other_address) as door,
        door.client() as client,
    ):
        expected = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
        chunks = streamed(client, body, lambda: several.other.send_signal(signal.SIGTERM))
        assert text_of(chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert several.other.wait(20)
        wait_until(lambda: client.get("/ready").status_code == 503)
    wait_until(lambda: several.num_targets_up() == 1)
    down = [each for each in several.services().values() if not each["is_up"]]
    assert len(down) == 1 and down[0]["problem"]
    messages = [video_message(data_url(running.clip))]
    for number in range(4):
        assert several.ask(messages=messages, cache_salt=str(number)).status_code == 200
    assert all(each["num_running"] == 0 for each in several.services().values() if each["is_up"])
