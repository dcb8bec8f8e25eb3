"""Where media may come from."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gateway.common.budget import FREE_BYTES, ByteBudget, Holding, MemoryFullError
from gateway.common.config import GatewaySettings
from gateway.media.reader import CopiedFiles, FrameTimes, MediaReader, MediaSource
from gateway.media.uploads import Uploads
from hippo.errors import ForbiddenError, InvalidRequestError, MediaError, NotFoundError
from hippo.media.frame_list import read_frame_list
from hippo.types import Media, MediaKind

HELD = Holding(ByteBudget(1 << 30), "a test")


def _settings(*domains: str, **others: Any) -> GatewaySettings:
    return GatewaySettings(target=("localhost:1",), allowed_media_domains=domains, **others)


@pytest.fixture
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Uploads:
    return Uploads(_settings(upload_dir=str(tmp_path_factory.mktemp("uploads"))))


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """The directory that paths may lie under."""
    folder = tmp_path / "inside"
    folder.mkdir()
    return folder


@pytest.fixture
def reader(uploads: Uploads, inside: Path) -> MediaReader:
    return MediaReader(
        _settings(allowed_local_media_path=(str(inside),), max_media_bytes=1000), uploads
    )


def _data_url(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


def _source(url: str | Path, **fields: Any) -> MediaSource:
    return MediaSource(MediaKind.VIDEO, str(url), "field", **fields)


async def _read(reader: MediaReader, url: str) -> bytes:
    (copied,) = await reader.copy_files(await reader.read_media([_source(url)], HELD), HELD)
    return copied.data


@pytest.mark.parametrize(
    "url",
    [
        "data:;base64,Ynl0ZXM=",
        "data:video/mp4;base64,Ynl0ZXM%3D",
        "data:video/webm;codecs=vp8,opus;base64,Ynl0ZXM=",
        'data:video/webm;codecs="vp8, opus"; base64,Ynl0ZXM=',
        "data:image/gif;base64,Ynl0ZXM=",
        "DATA:video/mp4;BASE64,Ynl0ZXM=",
        "data:video/mp4;base64,Ynl0ZXM",
        "data:video/mp4;base64,Ynl0%0AZXM=%0A",
        " \n data:video/mp4;base64, Ynl0\r\n ZXM= \n",
    ],
)
async def test_a_data_url_is_decoded(reader: MediaReader, url: str) -> None:
    assert await _read(reader, url) == b"bytes"


async def test_the_url_safe_alphabet_is_read_too(reader: MediaReader) -> None:
    data = bytes(range(248, 256)) * 3
    for digits in (base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()):
        for payload in (digits, digits.rstrip("=")):
            assert await _read(reader, f"data:video/mp4;base64,{payload}") == data


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:video/mp4;base64,Ynl0Z", "is not valid base64"),
        ("data:video/mp4;base64,Ynl=ZXM=", "is not valid base64"),
        ("data:video/mp4;base64,Ynl0é", "is not valid base64"),
        ("data:video/mp4;base64", "has no comma"),
        ("data:video/mp4;base64 Ynl0", "has no comma"),
        ("data:video/mp4,Ynl0", "is not base64"),
        ("data:video/mp4;base65,Ynl0", "is not base64"),
        ("file://[/clip.mp4", "is malformed"),
        ("clip.mp4", "no absolute path"),
        (f"data:video/mp4;{'x' * 2000};base64,Ynl0", "has no ;base64, in its first 1,024"),
    ],
)
async def test_what_is_wrong_with_a_url_is_told(reader: MediaReader, url: str, words: str) -> None:
    with pytest.raises(MediaError, match=words) as caught:
        await _read(reader, url)
    assert len(caught.value.message) < 300


async def test_white_space_around_a_url_is_left_out_and_that_of_a_path_is_not(
    reader: MediaReader, inside: Path
) -> None:
    (inside / "clip.mp4").write_bytes(b"data")
    (inside / "clip.mp4 ").write_bytes(b"other")
    assert await _read(reader, f" file://{inside}/clip.mp4\n") == b"data"
    assert await _read(reader, f"{inside}/clip.mp4 ") == b"other"


async def test_the_size_limit_is_exact(reader: MediaReader, inside: Path) -> None:
    most, path = bytes(1000), inside / "clip.mp4"
    path.write_bytes(most)
    assert await _read(reader, _data_url(most)) == await _read(reader, str(path)) == most
    path.write_bytes(most + b"x")
    for source in (_data_url(most + b"x"), str(path)):
        with pytest.raises(MediaError, match="1000 bytes"):
            await _read(reader, source)


async def test_a_path_is_read_only_under_an_allowed_directory(
    reader: MediaReader, inside: Path
) -> None:
    outside = inside.with_name("outside")
    outside.mkdir()
    for path in (inside / "clip.mp4", outside / "clip.mp4", inside / "a b.mp4"):
        path.write_bytes(b"data")
    (inside / "out.mp4").symlink_to(outside / "clip.mp4")
    (inside / "in.mp4").symlink_to(inside / "clip.mp4")
    for name in ("/clip.mp4", "/in.mp4", "/../inside/clip.mp4"):
        assert await _read(reader, f"{inside}{name}") == b"data"
    assert await _read(reader, f"file://{inside}/a%20b.mp4") == b"data"
    forbidden = [f"{inside}{end}" for end in ("/out.mp4", "/../outside/clip.mp4", "-not/clip.mp4")]
    for url in (f"{outside}/clip.mp4", "file://elsewhere/clip.mp4", *forbidden):
        with pytest.raises(ForbiddenError):
            await _read(reader, url)


@pytest.mark.parametrize(
    ("url", "flag"),
    [
        ("/clip.mp4", "--allowed-local-media-path"),
        ("https://media.example/clip.mp4", "--allowed-media-domains"),
        ("http://[::1", "--allowed-media-domains"),
        ("https://[2001:db8:85a3::8a2e:370:7334]/a.mp4", "--allowed-media-domains"),
    ],
)
async def test_paths_and_urls_are_off_by_default(uploads: Uploads, url: str, flag: str) -> None:
    with pytest.raises(ForbiddenError, match=flag):
        await _read(MediaReader(_settings(), uploads), url)


async def test_a_file_is_not_read_where_every_service_opens_it(
    reader: MediaReader, inside: Path
) -> None:
    path = inside / "clip.mp4"
    path.write_bytes(b"data")
    media = await reader.read_media([_source(path, uuid="a")], HELD)
    named = {"path": str(path), "num_bytes": 4, "modified_ns": path.stat().st_mtime_ns}
    assert media == (Media(MediaKind.VIDEO, **named, uuid="a"),)  # type: ignore[arg-type]
    copied = (Media(MediaKind.VIDEO, b"data", uuid="a"),)
    here, elsewhere = (str(inside),), ("/elsewhere", f"{inside}-not")
    for open_dirs, expected in (
        ([here, here], media),
        ([here], media),
        ([(*elsewhere, str(inside.parent)), here], media),
        ([here, elsewhere], copied),
        ([here, ()], copied),
        ([], copied),
    ):
        assert await reader.copy_files(media, HELD, open_dirs) == expected
    path.unlink()
    with pytest.raises(MediaError, match="cannot be read") as caught:
        await reader.copy_files(media, HELD)
    assert caught.value.param == "media[0]"


async def test_choices_share_one_copy_of_their_files(reader: MediaReader, inside: Path) -> None:
    (inside / "clip.mp4").write_bytes(b"a video")
    media = await reader.read_media([_source(inside / "clip.mp4")], HELD)
    in_bytes = CopiedFiles(reader, media, HELD)
    first, second = await asyncio.gather(in_bytes.read(), in_bytes.read())
    assert first[0].data == b"a video"
    assert first[0] is second[0]


async def test_what_a_request_holds_in_memory_is_bounded(uploads: Uploads, inside: Path) -> None:
    settings = _settings(allowed_local_media_path=(str(inside),), max_message_mib=1)
    reader = MediaReader(settings, uploads)
    half, whole = inside / "half.mp4", inside / "whole.mp4"
    half.write_bytes(bytes(1 << 19))
    whole.write_bytes(bytes(1 << 20))
    url = _data_url(half.read_bytes())
    media = await reader.read_media([_source(each) for each in (url, half, whole)], HELD)
    with pytest.raises(MediaError, match="--allowed-local-media-path") as caught:
        await reader.copy_files(media, HELD)
    assert caught.value.param == "media[2]"
    assert len(await reader.copy_files(media[:2], HELD)) == 2
    with pytest.raises(MediaError, match="more than 1048576 bytes"):
        await reader.read_media([_source(url)] * 3, HELD)


async def test_an_upload_is_read_by_its_id_for_its_owner_alone(
    reader: MediaReader, uploads: Uploads
) -> None:
    read = AsyncMock(side_effect=[b"a video", b""])
    upload = await uploads.add_upload(read, filename="clip.mp4", owner="alice")
    source = _source(upload.video_id)
    for owner in ("bob", None):
        with pytest.raises(NotFoundError) as caught:
            await reader.read_media([source], HELD, owner=owner)
        assert caught.value.param == "field"
    (media,) = await reader.copy_files(await reader.read_media([source], HELD, owner="alice"), HELD)
    assert media.data == b"a video"


FRAMES = "\ndata:video/jpeg;base64,b25l,\ndHdv\n,dGhyZWU"  # in all forms of base64


@pytest.mark.parametrize(
    ("times", "seconds", "end_s"),
    [
        (FrameTimes(1.0), (0.0, 1.0, 2.0), 3.0),
        (FrameTimes(2.0), (0.0, 0.5, 1.0), 1.5),
        (FrameTimes(30.0, (0, 15, 30)), (0.0, 0.5, 1.0), 1.5),
        (FrameTimes(30.0, (30, 45, 90)), (1.0, 1.5, 3.0), 4.0),
        (FrameTimes(30.0, (0, 15, 30), 4.0), (0.0, 0.5, 1.0), 1.5),
        (FrameTimes(30.0, (300, 330, 390), 13.5), (10.0, 11.0, 13.0), 13.5),
        (FrameTimes(0.5, (7, 8, 9)), (14.0, 16.0, 18.0), 20.0),
    ],
)
async def test_frames_become_one_list_with_the_times_that_the_request_says(
    reader: MediaReader, times: FrameTimes, seconds: tuple[float, ...], end_s: float
) -> None:
    (media,) = await reader.read_media([_source(FRAMES, times=times)], HELD)
    listed = read_frame_list(io.BytesIO(media.data), len(media.data))
    images = [media.data[start : start + size] for start, size in listed.spans]
    assert images == [b"one", b"two", b"three"]
    assert listed.seconds == seconds
    assert listed.end_s == end_s


@pytest.mark.parametrize(
    ("times", "param", "words"),
    [
        (FrameTimes(1.0, (0, 1)), "media_io_kwargs.video.frames_indices", "2 entries"),
        (FrameTimes(1.0, (), 2.0), "media_io_kwargs.video.duration", "lasts 2 s"),
        (FrameTimes(30, (30, 60, 90), 3.0), "media_io_kwargs.video.duration", "is 3 s after"),
        (FrameTimes(1, (1, 2, 10**5)), "media_io_kwargs.video.frames_indices", "100,000 s after"),
    ],
)
async def test_times_that_do_not_fit_the_frames_are_refused(
    reader: MediaReader, times: FrameTimes, param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        await reader.read_media([_source(FRAMES, times=times)], HELD)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ("b25l,@@@", "frame 1 of the video is not valid base64"),
        ("b25l,,dHdv", "frame 1 of the video is empty"),
        ("", "frame 0 of the video is empty"),
        ("b25l," * 5000 + "b25l", "larger than 60000 bytes"),
        ("," * 70_000, "70001 frames; at most 65536"),  # before they are decoded
    ],
    ids=["base64", "empty", "none", "size", "number"],
)
async def test_frames_that_cannot_be_read_are_named(
    uploads: Uploads, payload: str, words: str
) -> None:
    reader = MediaReader(_settings(max_media_bytes=60_000), uploads)
    with pytest.raises(MediaError, match=words):
        await _read(reader, f"data:video/jpeg;base64,{payload}")


async def test_media_count_with_what_all_requests_hold(uploads: Uploads) -> None:
    budget = ByteBudget(4 * FREE_BYTES)
    reader = MediaReader(_settings(), uploads)
    source = _source(_data_url(bytes(2 * FREE_BYTES)))
    first, second = (Holding(budget, "alice") for _ in range(2))
    await reader.read_media([source], first)
    with pytest.raises(MemoryFullError, match="one client's may hold"):
        await reader.read_media([source, source], second)
    first.release()
    second.release()
    await reader.read_media([source], Holding(budget, "alice"))
