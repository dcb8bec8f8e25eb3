"""Files that a service opens by path: which it takes, and what the gateway does if it cannot."""

import dataclasses
import os
import time
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from gateway.answer.report import AnswerRecord
from hippo.errors import InvalidRequestError, MediaError, MediaPathError
from hippo.types import Media, MediaKind, OpenRequest
from tests.support.clips import at_path
from tests.support.models.toy_model import ToyModel
from tests.support.running.gateways import completed, watching
from tests.support.running.services import (
    serving_draft,
    serving_pair,
    serving_target,
    target_only,
    toy_request,
    with_tokenizer,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of media, beside one that no service may read."""
    for name in ("media", "private"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "clip.mp4").write_bytes(b"toy:4")
    os.mkfifo(tmp_path / "media" / "pipe")
    (tmp_path / "media" / "out.mp4").symlink_to(tmp_path / "private" / "clip.mp4")
    (tmp_path / "media" / "in.mp4").symlink_to(tmp_path / "media" / "clip.mp4")
    return tmp_path / "media"


def _about(item: Media) -> OpenRequest:
    return toy_request(media=(item,), end_token_ids=(), max_tokens=20)


async def test_a_service_opens_the_files_of_its_directories_alone(folder: Path) -> None:
    good = at_path(folder / "clip.mp4")
    async with serving_target(ToyModel(), allowed_local_media_path=(str(folder),)) as (_, client):
        assert (await client.get_model()).media_dirs == (str(folder),)
        expected = (await target_only(client, _about(Media(MediaKind.VIDEO, b"toy:4")))).token_ids
        for path in (folder / "clip.mp4", folder / "in.mp4"):
            assert (await target_only(client, _about(at_path(path)))).token_ids == expected
        for item, words in (
            (at_path(folder.parent / "private" / "clip.mp4"), "not under a directory"),
            (at_path(folder / "out.mp4"), "not under a directory"),
            (dataclasses.replace(good, path=f"{folder}/../private/clip.mp4"), "not under"),
            (dataclasses.replace(good, path="clip.mp4"), "not under a directory"),
            (dataclasses.replace(good, path=f"{folder}/missing.mp4"), "missing"),
            (dataclasses.replace(good, path=str(folder)), "cannot be read"),
            (at_path(folder / "pipe"), "cannot be read"),
            (dataclasses.replace(good, path="a\0b"), "cannot be read"),
            (dataclasses.replace(good, num_bytes=9), "size or time"),
            (dataclasses.replace(good, modified_ns=9), "size or time"),
        ):
            with pytest.raises(MediaPathError, match=words) as caught:
                await target_only(client, _about(item))
            assert caught.value.param == "media[0]"
            assert str(folder.parent) not in caught.value.message
        with pytest.raises(InvalidRequestError, match="is set beside data"):
            await target_only(client, _about(dataclasses.replace(good, data=b"toy:4")))


async def test_a_file_that_changed_is_read_again(folder: Path) -> None:
    path = folder / "clip.mp4"
    async with serving_target(ToyModel(), allowed_local_media_path=(str(folder),)) as (_, client):
        for num_frames in (4, 8):
            path.write_bytes(b"toy:%d" % num_frames)
            os.utime(path, ns=(0, (num_frames - 6) * 10**9))  # the first is older than 1970
            expected = await target_only(client, _about(Media(MediaKind.VIDEO, path.read_bytes())))
            answer = await target_only(client, _about(at_path(path)))
            assert answer.token_ids == expected.token_ids


@pytest.mark.parametrize("refuses", ["target", "draft", "both"])
async def test_where_a_service_cannot_open_a_file_its_bytes_are_sent(
    folder: Path, refuses: str
) -> None:
    request = _about(at_path(folder / "clip.mp4"))
    dirs = {
        name: () if refuses in (name, "both") else (str(folder),) for name in ("target", "draft")
    }
    target, draft = (with_tokenizer(ToyModel(num_slots=2)) for _ in range(2))
    in_bytes = _about(Media(MediaKind.VIDEO, b"toy:4"))
    copy_files = AsyncMock(return_value=in_bytes.media)
    record = AnswerRecord(policy="vpsd", received_ns=time.monotonic_ns())

    def wait_for_draft() -> None:  # on the target's thread
        while record.draft_prompt is None:
            time.sleep(0.005)

    async with (
        serving_target(target, allowed_local_media_path=dirs["target"]) as (_, target_client),
        serving_draft(draft, allowed_local_media_path=dirs["draft"]) as (_, draft_client),
    ):
        expected = await target_only(target_client, in_bytes)
        target.on_forward = lambda plan: wait_for_draft()
        async with watching([target_client], [draft_client]) as backends:
            completion = await completed(backends, request, record=record, copy_files=copy_files)
    assert completion.error is None
    assert completion.token_ids == expected.token_ids
    assert copy_files.await_count == (2 if refuses == "both" else 1)


async def test_a_file_that_can_neither_be_opened_nor_copied_is_an_error(folder: Path) -> None:
    copy_files = AsyncMock(side_effect=MediaError("too large for a message", param="media[0]"))
    request = _about(at_path(folder / "clip.mp4"))
    target, draft = (with_tokenizer(ToyModel()) for _ in range(2))
    async with serving_pair(target, draft) as clients:
        async with watching(*([each] for each in clients)) as backends:
            completion = await completed(backends, request, copy_files=copy_files)
    assert isinstance(completion.error, MediaError)
    assert completion.record.num_completion_tokens == 0
