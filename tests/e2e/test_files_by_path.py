"""Files that the services open themselves, and what happens where they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.support import (
    CHAT,
    Door,
    Running,
    chat_body,
    data_url,
    further_gateway,
    write_clip,
)


@pytest.fixture(scope="module")
def small_door(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A gateway that sends no file of more than 1 MiB as bytes, with a folder of its own."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with further_gateway(
        running,
        "--allowed-local-media-path", f"{running.media_folder},{elsewhere}",
        "--upload-dir", str(elsewhere),
        "--max-message-mib", "1",
    ) as door:  # fmt: skip
        write_clip(elsewhere / "clip.mp4")
        _write_large_clip(elsewhere / "large.mp4")
        door.child.folder = elsewhere  # type: ignore[attr-defined]
        yield door


def _write_large_clip(path: Path) -> Path:
    """A clip with 2 MiB of padding, in a box that readers of mp4 skip."""
    write_clip(path)
    size = 2 << 20
    with path.open("ab") as file:
        file.write(size.to_bytes(4, "big") + b"free" + bytes(size - 8))
    return path


def _ask(door: Door, url: str, **fields: Any) -> httpx.Response:
    with door.client() as http:
        return http.post(CHAT, json=chat_body(url, 8, **fields))


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    assert response.json()["hippo"]["num_draft_losses"] == 0
    return str(response.json()["choices"][0]["message"]["content"])


def test_a_file_that_both_services_open_may_be_larger_than_a_message(
    small_door: Door, running: Running
) -> None:
    large = _write_large_clip(running.media_folder / "large_clip.mp4")
    expected = _text(_ask(small_door, data_url(running.clip)))
    assert _text(_ask(small_door, str(large))) == expected


def test_a_file_elsewhere_is_sent_as_bytes_if_it_is_small(
    small_door: Door, running: Running
) -> None:
    folder: Path = small_door.child.folder  # type: ignore[attr-defined]
    assert _text(_ask(small_door, f"{folder}/clip.mp4")) == _text(
        _ask(small_door, str(running.clip))
    )
    refused = _ask(small_door, f"{folder}/large.mp4")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "messages.0.content.0.video_url")
    assert "--allowed-local-media-path" in error["message"]
