"""Files that the services open themselves, and what happens where they cannot."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.api.media_fields import ITEM_TOKENS, MESSAGE_TOKENS, TEMPLATE_TOKENS
from tests.e2e.support import (
    CHAT,
    Door,
    Running,
    chat_body,
    chunks_of,
    data_url,
    further_gateway,
    text_of,
    wait_until,
    write_clip,
)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that requests may name and the services do not open."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def small_door(running: Running, elsewhere: Path) -> Iterator[Door]:
    """A gateway that sends at most 1 MiB as bytes, and keeps uploads where the services read."""
    with further_gateway(
        running,
        "--allowed-local-media-path", f"{running.media_folder},{elsewhere}",
        "--upload-dir", str(running.media_folder),
        "--max-message-mib", "1",
        "--max-body-bytes", str(1 << 20),
        "--stream-keepalive-s", "0.1",
    ) as door:  # fmt: skip
        yield door


def _write_large_clip(path: Path) -> Path:
    """A clip with 2 MiB of padding, in a box that readers of mp4 skip."""
    write_clip(path)
    size = 2 << 20
    with path.open("ab") as file:
        file.write(size.to_bytes(4, "big") + b"free" + bytes(size - 8))
    return path


def _ask(door: Door, url: str) -> Any:
    with door.client() as http:
        response = http.post(CHAT, json=chat_body(url, 8))
    assert response.status_code == 200, response.text
    assert response.json()["hippo"]["num_draft_losses"] == 0
    return response.json()


def _text(door: Door, url: str | Path) -> str:
    return str(_ask(door, str(url))["choices"][0]["message"]["content"])


def test_a_file_that_both_services_open_may_be_larger_than_a_message(
    small_door: Door, running: Running
) -> None:
    large = _write_large_clip(running.media_folder / "large_clip.mp4")
    assert _text(small_door, large) == _text(small_door, data_url(running.clip))


def test_an_upload_may_be_larger_than_a_message_and_a_body(
    small_door: Door, running: Running, tmp_path: Path
) -> None:
    large = _write_large_clip(tmp_path / "large.mp4")
    with small_door.client() as http:
        answer = http.post("/v1/videos", files={"file": ("large.mp4", large.read_bytes())})
        assert answer.status_code == 200, answer.text
        assert answer.json()["bytes"] == large.stat().st_size
        refused = http.post(CHAT, json=chat_body(data_url(large), 8))
        assert refused.status_code == 413 and "/v1/videos" in refused.text
    assert _text(small_door, answer.json()["id"]) == _text(small_door, running.clip)


def test_an_upload_that_is_deleted_is_kept_for_the_request_at_work(
    small_door: Door, running: Running
) -> None:
    expected = _text(small_door, running.clip)
    target = running.stack.child("target")
    with small_door.client() as http:
        files = {"file": ("clip.mp4", running.clip.read_bytes())}
        video_id = http.post("/v1/videos", files=files).json()["id"]
        body = chat_body(video_id, 8, stream=True)
        target.send_signal(signal.SIGSTOP)  # it opens the file after the deletion
        try:
            with http.stream("POST", CHAT, json=body) as response:
                assert http.delete(f"/v1/videos/{video_id}").status_code == 200
                target.send_signal(signal.SIGCONT)
                assert text_of(list(chunks_of(response))) == expected
        finally:
            target.send_signal(signal.SIGCONT)
        assert http.post(CHAT, json=body).status_code == 404
    wait_until(lambda: not list(running.media_folder.glob(f"*/{video_id}")))


def test_a_file_elsewhere_that_is_larger_than_a_message_is_refused(
    small_door: Door, elsewhere: Path
) -> None:
    large = _write_large_clip(elsewhere / "large.mp4")
    with small_door.client() as http:
        refused = http.post(CHAT, json=chat_body(str(large), 8))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "messages.0.content.0.video_url")
    assert "--allowed-local-media-path" in error["message"]


def test_what_a_template_adds_is_within_what_the_gateway_subtracts(
    small_door: Door, running: Running
) -> None:
    """The videos' share of the context is computed from the text's tokens and these bounds."""
    answer = _ask(small_door, str(running.clip))
    with small_door.client() as http:
        num_text = http.post("/tokenize", json={"prompt": "Describe the video."}).json()["count"]
    num_visual = answer["hippo"]["pruning"]["num_visual_tokens"]
    num_added = answer["usage"]["prompt_tokens"] - num_visual - num_text
    assert 0 < num_added <= TEMPLATE_TOKENS + MESSAGE_TOKENS + ITEM_TOKENS
