"""Where media may come from."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import certifi
import pytest

from gateway.config import GatewaySettings
from gateway.fetch import UrlFetcher, is_public_address
from gateway.media import FrameTimes, MediaReader, MediaSource
from gateway.uploads import Uploads
from hippo.errors import (
    ForbiddenError,
    HippoError,
    InvalidRequestError,
    MediaError,
    NotFoundError,
)
from hippo.types import Media, MediaKind
from hippo.video.frame_list import read_frame_list


def _settings(*domains: str, **others: Any) -> GatewaySettings:
    return GatewaySettings(target=("localhost:1",), allowed_media_domains=domains, **others)


def _fetcher(*domains: str, allow_http: bool = False, allow_private: bool = False) -> UrlFetcher:
    return UrlFetcher(
        _settings(
            *domains,
            allow_http_media=allow_http,
            allow_private_media_addresses=allow_private,
        )
    )


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


def _count(num_bytes: int) -> None:
    """The bytes of a fetched URL are not limited here."""


async def _read(reader: MediaReader, url: str, kind: MediaKind = MediaKind.VIDEO) -> bytes:
    media = await reader.read_media([MediaSource(kind, url, "field")])
    (copied,) = await reader.copy_files(media)
    return copied.data


@pytest.mark.parametrize(
    "url",
    [
        "data:video/mp4;base64,Ynl0ZXM=",
        "data:video/webm;codecs=vp9;base64,Ynl0ZXM=",
        "data:;base64,Ynl0ZXM=",
        "data:video/mp4;base64,Ynl0ZXM%3D",
    ],
)
async def test_a_data_url_is_decoded(reader: MediaReader, url: str) -> None:
    assert await _read(reader, url) == b"bytes"


async def test_an_error_names_the_field(reader: MediaReader) -> None:
    with pytest.raises(MediaError) as caught:
        await _read(reader, "data:video/mp4;base64,")
    assert caught.value.param == "field"


@pytest.mark.parametrize(("size", "is_taken"), [(1000, True), (1001, False)])
async def test_the_size_limit_is_exact(
    reader: MediaReader, inside: Path, size: int, is_taken: bool
) -> None:
    path = inside / "clip.mp4"
    path.write_bytes(b"x" * size)
    url = f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
    for source in (url, str(path)):
        if is_taken:
            assert len(await _read(reader, source)) == size
        else:
            with pytest.raises(MediaError, match="1000 bytes"):
                await _read(reader, source)


async def test_a_path_is_read_only_under_an_allowed_directory(
    reader: MediaReader, inside: Path
) -> None:
    outside = inside.with_name("outside")
    outside.mkdir()
    for folder in (inside, outside):
        (folder / "clip.mp4").write_bytes(b"data")
    (inside / "out.mp4").symlink_to(outside / "clip.mp4")
    (inside / "in.mp4").symlink_to(inside / "clip.mp4")
    (inside / "a b.mp4").write_bytes(b"data")
    for url in (
        f"{inside}/clip.mp4",
        f"{inside}/in.mp4",
        f"{inside}/../inside/clip.mp4",
        f"file://{inside}/a%20b.mp4",
    ):
        assert await _read(reader, url) == b"data"
    for url in (
        f"{outside}/clip.mp4",
        f"{inside}/out.mp4",
        f"{inside}/../outside/clip.mp4",
        f"{inside}-not/clip.mp4",
        "file://elsewhere/clip.mp4",
    ):
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
    media = await reader.read_media([MediaSource(MediaKind.VIDEO, str(path), "field", uuid="a")])
    status = path.stat()
    named = Media(
        MediaKind.VIDEO,
        path=str(path),
        num_bytes=4,
        modified_ns=status.st_mtime_ns,
        uuid="a",
    )
    assert media == (named,)
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
        assert await reader.copy_files(media, open_dirs) == expected
    path.unlink()
    with pytest.raises(MediaError, match="cannot be read") as caught:
        await reader.copy_files(media)
    assert caught.value.param == "media[0]"


async def test_what_a_request_holds_in_memory_is_bounded(uploads: Uploads, inside: Path) -> None:
    settings = _settings(allowed_local_media_path=(str(inside),), max_message_mib=1)
    reader = MediaReader(settings, uploads)
    half, whole = inside / "half.mp4", inside / "whole.mp4"
    half.write_bytes(bytes(1 << 19))
    whole.write_bytes(bytes(1 << 20))
    url = f"data:video/mp4;base64,{base64.b64encode(half.read_bytes()).decode()}"

    def sources(*urls: str | Path) -> list[MediaSource]:
        return [MediaSource(MediaKind.VIDEO, str(each), "field") for each in urls]

    media = await reader.read_media(sources(url, half, whole))
    with pytest.raises(MediaError, match="--allowed-local-media-path") as caught:
        await reader.copy_files(media)
    assert caught.value.param == "media[2]"
    assert len(await reader.copy_files(media[:2])) == 2
    with pytest.raises(MediaError, match="more than 1048576 bytes"):
        await reader.read_media(sources(url, url, url))


async def test_only_regular_files_are_read(reader: MediaReader, inside: Path) -> None:
    os.mkfifo(inside / "pipe.mp4")
    for name in ("pipe.mp4", ""):
        with pytest.raises(MediaError, match="regular file"):
            await _read(reader, f"{inside}/{name}")
    with pytest.raises(HippoError):
        await _read(reader, f"{inside}/null\0byte")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://media.example/clip.mp4", "scheme is 'http'"),
        ("https://other.example/clip.mp4", "not on this server's list"),
        ("https://media.example.evil/clip.mp4", "not on this server's list"),
        ("https://evilmedia.example/clip.mp4", "not on this server's list"),
        ("https://cdn.media.example/clip.mp4", "not on this server's list"),
        ("https://user:secret@media.example/clip.mp4", "credentials"),
        ("https://media.example@evil.example/clip.mp4", "credentials"),
        ("https://127.0.0.1/clip.mp4", "not on this server's list"),
    ],
)
async def test_a_url_off_the_list_is_not_fetched(url: str, expected: str) -> None:
    with pytest.raises(ForbiddenError, match=expected):
        await _fetcher("media.example").fetch_url(url, _count)


async def test_a_wildcard_means_subdomains_alone() -> None:
    fetcher = _fetcher("*.media.invalid")
    with pytest.raises(ForbiddenError, match="list"):
        await fetcher.fetch_url("https://media.invalid/clip.mp4", _count)
    with pytest.raises(MediaError, match="cannot be resolved"):
        await fetcher.fetch_url("https://cdn.media.invalid/clip.mp4", _count)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254"])
async def test_an_allowed_name_with_a_private_address_is_refused(host: str) -> None:
    fetcher = _fetcher("127.0.0.1", "localhost", "::1", "10.0.0.1", "169.254.169.254")
    with pytest.raises(ForbiddenError, match="not public"):
        await fetcher.fetch_url(f"https://{host}/clip.mp4", _count)


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("not an address", False),
    ],
)
def test_what_counts_as_a_public_address(address: str, is_public: bool) -> None:
    assert is_public_address(address) is is_public


async def test_a_connection_whose_certificate_is_one_hosts_is_not_used_for_another(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndata")
        writer.close()

    async def resolve(host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(certifi, "where", lambda: str(pki / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pki / "service.pem", pki / "service.key")
    fetcher = _fetcher("one.example", "two.example", allow_private=True)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
            for _ in range(2):
                url = f"https://one.example:{port}/clip.mp4"
                assert await fetcher.fetch_url(url, _count) == b"data"
            with pytest.raises(MediaError, match="certificate"):
                await fetcher.fetch_url(f"https://two.example:{port}/clip.mp4", _count)
        await fetcher.close()


async def test_an_item_that_is_refused_ends_the_fetch_beside_it(uploads: Uploads) -> None:
    is_fetching, has_left = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /slow"):
            is_fetching.set()
            await reader.read()  # to its end
            has_left.set()
        else:
            await is_fetching.wait()
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    private: dict[str, Any] = {"allow_http_media": True, "allow_private_media_addresses": True}
    reader = MediaReader(_settings("127.0.0.1", **private), uploads)
    async with server:
        base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        sources = [MediaSource(MediaKind.VIDEO, f"{base}/{name}", name) for name in ("slow", "bad")]
        with pytest.raises(MediaError, match="status 404") as caught:
            await reader.read_media(sources)
        assert caught.value.param == "bad"
        await asyncio.wait_for(has_left.wait(), 2)
    await reader.close()


async def _upload(uploads: Uploads, data: bytes, owner: str | None = None) -> str:
    pieces = iter([data, b""])

    async def read() -> bytes:
        return next(pieces)

    return (await uploads.add_upload(read, filename="clip.mp4", owner=owner)).video_id


async def test_an_upload_is_read_by_its_id_for_its_owner_alone(
    reader: MediaReader, uploads: Uploads
) -> None:
    video_id = await _upload(uploads, b"a video", owner="alice")
    source = MediaSource(MediaKind.VIDEO, video_id, "field")
    for owner in ("bob", None):
        with pytest.raises(NotFoundError) as caught:
            await reader.read_media([source], owner=owner)
        assert caught.value.param == "field"
    (media,) = await reader.copy_files(await reader.read_media([source], owner="alice"))
    assert media.data == b"a video"


async def test_an_upload_is_no_image(reader: MediaReader, uploads: Uploads) -> None:
    video_id = await _upload(uploads, b"a video")
    with pytest.raises(MediaError):
        await _read(reader, video_id, MediaKind.IMAGE)


FRAMES = "data:video/jpeg;base64,b25l,dHdv,dGhyZWU="


@pytest.mark.parametrize(
    ("times", "seconds", "duration_s"),
    [
        (FrameTimes(1.0), (0.0, 1.0, 2.0), 3.0),
        (FrameTimes(2.0), (0.0, 0.5, 1.0), 1.5),
        (FrameTimes(30.0, (0, 15, 30)), (0.0, 0.5, 1.0), 1.5),
        (FrameTimes(30.0, (30, 45, 90)), (0.0, 0.5, 2.0), 3.0),
        (FrameTimes(30.0, (0, 15, 30), 4.0), (0.0, 0.5, 1.0), 4.0),
    ],
)
async def test_frames_become_one_list_with_the_times_that_the_request_says(
    reader: MediaReader, times: FrameTimes, seconds: tuple[float, ...], duration_s: float
) -> None:
    source = MediaSource(MediaKind.VIDEO, FRAMES, "field", times)
    (media,) = await reader.read_media([source])
    listed = read_frame_list(io.BytesIO(media.data), len(media.data))
    images = [media.data[start : start + size] for start, size in listed.spans]
    assert images == [b"one", b"two", b"three"]
    assert listed.seconds == seconds
    assert listed.duration_s == duration_s


@pytest.mark.parametrize(
    ("times", "param", "words"),
    [
        (FrameTimes(1.0, (0, 1)), "media_io_kwargs.video.frames_indices", "2 entries"),
        (FrameTimes(1.0, (), 2.0), "media_io_kwargs.video.duration", "lasts 2 s"),
    ],
)
async def test_times_that_do_not_fit_the_frames_are_refused(
    reader: MediaReader, times: FrameTimes, param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        await reader.read_media([MediaSource(MediaKind.VIDEO, FRAMES, "field", times)])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ("b25l,@@@", "frame 1 of the video is not valid base64"),
        ("b25l,,dHdv", "frame 1 of the video is empty"),
        ("", "frame 0 of the video is empty"),
        ("b25l," * 160, "larger than 1000 bytes"),
    ],
)
async def test_frames_that_cannot_be_read_are_named(
    reader: MediaReader, payload: str, words: str
) -> None:
    if words.startswith("larger"):
        payload = payload.rstrip(",")
    with pytest.raises(MediaError, match=words):
        await _read(reader, f"data:video/jpeg;base64,{payload}")


async def test_more_frames_than_any_service_takes_are_refused_before_they_are_decoded(
    uploads: Uploads,
) -> None:
    reader = MediaReader(_settings(), uploads)
    with pytest.raises(MediaError, match="70001 frames; at most 65536"):
        await _read(reader, "data:video/jpeg;base64," + "," * 70_000)


async def test_malformed_urls_are_the_callers_mistake(reader: MediaReader) -> None:
    with pytest.raises(MediaError, match="is malformed"):
        await _read(reader, "file://[/clip.mp4")
    fetcher = _fetcher("*.example", allow_http=True)
    for url in ("http://[::1", "http://a.example:99999/", "http://" + "é" * 70 + ".example/"):
        with pytest.raises(MediaError):
            await fetcher.fetch_url(url, _count)


async def test_a_domain_of_other_letters_is_allowed_by_either_of_its_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    async def resolve(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        raise OSError

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    for domain in ("*.Müller.example", "*.xn--mller-kva.example"):
        for host in ("a.müller.example", "a.xn--mller-kva.example."):
            with pytest.raises(MediaError, match="cannot be resolved"):
                await _fetcher(domain).fetch_url(f"https://{host}/clip.mp4", _count)
    assert asked == ["a.xn--mller-kva.example"] * 4


@pytest.mark.parametrize(
    ("status", "location", "words"),
    [(302, None, "status 302"), (302, "http://[", "redirects to one that is malformed")],
)
async def test_redirects_that_lead_nowhere_are_the_urls_fault(
    status: int, location: str | None, words: str
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        lines = [f"HTTP/1.1 {status} Found", "Content-Length: 0", "Connection: close"]
        lines += [f"Location: {location}"] if location else []
        writer.write("\r\n".join([*lines, "", ""]).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    fetcher = _fetcher("127.0.0.1", allow_http=True, allow_private=True)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(MediaError, match=words):
            await fetcher.fetch_url(f"http://127.0.0.1:{port}/clip.mp4", _count)
        with pytest.raises(MediaError):
            await fetcher.fetch_url(f"http://127.0.0.1:{port}/" + "x" * 70_000, _count)
        with pytest.raises(MediaError, match="cannot be sent"):
            await fetcher.fetch_url(f"http://127.0.0.1:{port}/\ud800", _count)
    await fetcher.close()
