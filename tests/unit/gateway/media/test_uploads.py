"""Uploaded videos: kept for a while, bounded, and each its owner's."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.common.config import GatewaySettings
from gateway.media.uploads import ReadPiece, Uploads, UploadsFullError, is_upload_id
from hippo.errors import InvalidRequestError, MediaError, NotFoundError
from tests.support.running.gateways import Clock

TTL_S = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uploads(tmp_path: Path, clock: Clock) -> Uploads:
    return _uploads(tmp_path, clock)


def _uploads(folder: Path, clock: Clock, *, max_bytes: int = 100) -> Uploads:
    limits: dict[str, Any] = {"max_upload_bytes": max_bytes, "max_media_bytes": 60}
    limits |= {"upload_dir": str(folder), "upload_ttl_s": TTL_S}
    return Uploads(GatewaySettings(target=("localhost:1",), **limits), clock_s=clock)


def _reading(data: bytes) -> ReadPiece:
    pieces = iter([data[start : start + 7] for start in range(0, len(data), 7)])

    async def read() -> bytes:
        return next(pieces, b"")

    return read


async def _add(uploads: Uploads, size: int) -> str:
    upload = await uploads.add_upload(_reading(b"x" * size), filename="", owner=None)
    return upload.video_id


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_what_was_uploaded_is_read_again(uploads: Uploads) -> None:
    data = bytes(range(50))
    upload = await uploads.add_upload(_reading(data), filename="a.mp4", owner=None)
    assert is_upload_id(upload.video_id)
    assert (upload.num_bytes, upload.filename) == (50, "a.mp4")
    assert upload.expires_s == upload.created_s + TTL_S
    assert (uploads.folder / uploads.get(upload.video_id, None).video_id).read_bytes() == data


@pytest.mark.parametrize("expires", [False, True])
async def test_what_a_request_uses_is_kept_until_its_end(
    uploads: Uploads, clock: Clock, tmp_path: Path, expires: bool
) -> None:
    """An upload that expires or is deleted meanwhile."""
    video_id = await _add(uploads, 60)
    with uploads.keeping([video_id, "data:,"]):
        with uploads.keeping([video_id, video_id]):
            if expires:
                clock.now_s += TTL_S
            else:
                uploads.delete(video_id, None)
            with pytest.raises(NotFoundError):
                uploads.get(video_id, None)
        assert [path.name for path in _files(tmp_path)] == [video_id]
        with pytest.raises(UploadsFullError):  # its bytes count
            await _add(uploads, 60)
    assert _files(tmp_path) == []
    await _add(uploads, 60)


async def test_the_size_of_a_file_is_bounded(uploads: Uploads, tmp_path: Path) -> None:
    for size in (0, 61):
        with pytest.raises(MediaError):
            await _add(uploads, size)
        assert _files(tmp_path) == []
    await _add(uploads, 60)


async def test_a_full_store_takes_no_more_until_something_has_gone(
    uploads: Uploads, clock: Clock, tmp_path: Path
) -> None:
    video_id = await _add(uploads, 60)
    with pytest.raises(UploadsFullError):
        await _add(uploads, 41)
    clock.now_s += TTL_S
    with pytest.raises(NotFoundError):
        uploads.get(video_id, None)
    assert _files(tmp_path) == []
    await _add(uploads, 60)


async def test_without_room_for_any_there_are_no_uploads(tmp_path: Path, clock: Clock) -> None:
    uploads = _uploads(tmp_path, clock, max_bytes=0)
    with pytest.raises(InvalidRequestError):
        await _add(uploads, 1)


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (ConnectionError("reset"), ConnectionError, "reset"),
        (OSError(errno.ENOSPC, "No space left on device"), UploadsFullError, "--upload-dir"),
    ],
)
async def test_an_upload_that_breaks_off_leaves_nothing(
    uploads: Uploads, tmp_path: Path, failure: OSError, error: type[Exception], words: str
) -> None:
    async def read() -> bytes:
        if not _files(tmp_path):
            return b"x" * 20
        raise failure

    for _ in range(6):
        with pytest.raises(error, match=words):
            await uploads.add_upload(read, filename="", owner=None)
    assert _files(tmp_path) == []
    await _add(uploads, 60)


async def test_what_a_killed_gateway_left_is_deleted_and_anothers_is_not(
    tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "hippo-uploads-killed").mkdir()
    (tmp_path / "hippo-uploads-killed" / "video").write_bytes(b"x")
    (tmp_path / "kept").mkdir()
    first, second = _uploads(tmp_path, clock), _uploads(tmp_path, clock)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"kept", first.folder.name, second.folder.name}


@pytest.mark.parametrize(
    "moment", ["gateway.media.uploads.os.open", "gateway.media.uploads.fcntl.flock"]
)
async def test_a_folder_that_another_gateway_deletes_before_it_is_locked_is_made_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real = os.open if moment.endswith("open") else fcntl.flock

    def deleted_before(*arguments: Any) -> Any:
        monkeypatch.undo()
        for folder in tmp_path.iterdir():
            folder.rmdir()
        return real(*arguments)

    monkeypatch.setattr(moment, deleted_before)
    uploads = _uploads(tmp_path, clock)
    assert [await _add(uploads, 1)] == [path.name for path in _files(tmp_path)]


async def test_closing_deletes_everything(uploads: Uploads, tmp_path: Path) -> None:
    await _add(uploads, 1)
    uploads.close()
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None)
@given(st.text(max_size=60))
def test_only_ids_that_were_given_out_are_ids(text: str) -> None:
    assert is_upload_id(text) == (
        len(text) == 38 and text.startswith("video-") and set(text[6:]) <= set("0123456789abcdef")
    )
