"""Which URLs are fetched, and what may go wrong."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import certifi
import pytest

from gateway.common.config import GatewaySettings
from gateway.media.fetch import UrlFetcher, is_public_address
from hippo.errors import ForbiddenError, MediaError
from tests.support.running.tcp import serving


def _fetcher(
    *domains: str, allow_http: bool = False, allow_private: bool = False, **others: Any
) -> UrlFetcher:
    settings = GatewaySettings(
        target=("localhost:1",),
        allowed_media_domains=domains,
        allow_http_media=allow_http,
        allow_private_media_addresses=allow_private,
        **others,
    )
    return UrlFetcher(settings)


@asynccontextmanager
async def _answering(
    answer: Callable[[str, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The URL of a server that lets ``answer`` write what there is at a path."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await answer(head.split()[1].decode(), writer)

    async with serving(handle) as port:
        yield f"http://127.0.0.1:{port}"


def _count(num_bytes: int) -> None:
    """The bytes of a fetched URL are not limited here."""


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
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::5db8:d70e", True),
        ("64:ff9b:1::5db8:d70e", False),
        ("::ffff:93.184.215.14", False),
        ("::ffff:0:93.184.215.14", False),
        ("::93.184.215.14", False),
        ("2001:0:5db8:d70e::1", False),
        ("fec0::1", False),
        ("5f00::1", False),
        ("3fff::1", False),
        ("192.88.99.1", False),
        ("192.0.0.8", False),
        ("198.18.0.1", False),
        ("not an address", False),
    ],
)
def test_what_counts_as_a_public_address(address: str, is_public: bool) -> None:
    assert is_public_address(address) is is_public


async def test_a_connection_whose_certificate_is_one_hosts_is_not_used_for_another(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndata")

    async def resolve(host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(certifi, "where", lambda: str(pki / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pki / "service.pem", pki / "service.key")
    fetcher = _fetcher("one.example", "two.example", allow_private=True)
    async with serving(answer, context) as port:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
            for _ in range(2):
                url = f"https://one.example:{port}/clip.mp4"
                assert await fetcher.fetch_url(url, _count) == b"data"
            with pytest.raises(MediaError, match="certificate"):
                await fetcher.fetch_url(f"https://two.example:{port}/clip.mp4", _count)
        await fetcher.close()


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a.example:99999/", "http://" + "é" * 70 + ".example/"]
)
async def test_a_malformed_url_is_the_callers_mistake(url: str) -> None:
    with pytest.raises(MediaError):
        await _fetcher("*.example", allow_http=True).fetch_url(url, _count)


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
    [(302, None, "status 302"), (302, "http://[::1", "cannot be fetched")],
)
async def test_redirects_that_lead_nowhere_are_the_urls_fault(
    status: int, location: str | None, words: str
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        lines = [f"HTTP/1.1 {status} Found", "Content-Length: 0", "Connection: close"]
        lines += [f"Location: {location}"] if location else []
        writer.write("\r\n".join([*lines, "", ""]).encode())

    fetcher = _fetcher("127.0.0.1", allow_http=True, allow_private=True)
    async with serving(answer) as port:
        with pytest.raises(MediaError, match=words):
            await fetcher.fetch_url(f"http://127.0.0.1:{port}/clip.mp4", _count)
        with pytest.raises(MediaError):
            await fetcher.fetch_url(f"http://127.0.0.1:{port}/" + "x" * 70_000, _count)
        with pytest.raises(MediaError, match="cannot be sent"):
            await fetcher.fetch_url(f"http://127.0.0.1:{port}/\ud800", _count)
    await fetcher.close()


_LOCAL = {"allow_http": True, "allow_private": True}


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_file_is_at_most_as_large_as_the_operator_allows(is_declared: bool) -> None:
    """Whether the server tells its size or not."""

    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        data = bytes(int(path.strip("/")))
        length = b"Content-Length: %d\r\n" % len(data) if is_declared else b""
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"Connection: close\r\n\r\n")
        for start in range(0, len(data), 100):
            writer.write(data[start : start + 100])

    fetcher = _fetcher("127.0.0.1", **_LOCAL, max_media_bytes=1000)
    async with _answering(answer) as url:
        assert await fetcher.fetch_url(f"{url}/1000", _count) == bytes(1000)
        with pytest.raises(MediaError, match="larger than 1000 bytes"):
            await fetcher.fetch_url(f"{url}/1001", _count)
    await fetcher.close()


async def test_a_file_without_end_is_read_no_further_than_the_limit() -> None:
    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(bytes(1000))
            await writer.drain()

    fetcher = _fetcher("127.0.0.1", **_LOCAL, max_media_bytes=10_000)
    async with _answering(answer) as url:
        with pytest.raises(MediaError, match="larger than 10000 bytes"):
            await fetcher.fetch_url(url, _count)
    await fetcher.close()


async def test_a_file_that_comes_byte_by_byte_must_be_there_in_time_as_a_whole() -> None:
    """Though no byte is late."""
    is_over = asyncio.Event()

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        for _number in range(100):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)
        is_over.set()

    fetcher = _fetcher("127.0.0.1", **_LOCAL, media_timeout_s=0.5)
    async with _answering(answer) as url:
        with pytest.raises(MediaError, match=r"took longer than 0\.5 s, this server's limit"):
            await fetcher.fetch_url(url, _count)
        assert not is_over.is_set()
    await fetcher.close()


async def test_three_redirects_are_followed_and_a_fourth_is_not() -> None:
    asked = []

    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        asked.append(path)
        num_left = int(path.strip("/"))
        if num_left:
            writer.write(b"HTTP/1.1 302 Found\r\nLocation: /%d\r\n" % (num_left - 1))
            writer.write(b"Content-Length: 0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndata")

    fetcher = _fetcher("127.0.0.1", **_LOCAL)
    async with _answering(answer) as url:
        assert await fetcher.fetch_url(f"{url}/3", _count) == b"data"
        assert asked == ["/3", "/2", "/1", "/0"]
        with pytest.raises(MediaError, match="redirects more than 3 times"):
            await fetcher.fetch_url(f"{url}/4", _count)
        assert asked[4:] == ["/4", "/3", "/2", "/1"]
    await fetcher.close()


@pytest.mark.parametrize(
    "addresses",
    [("10.0.0.1", "93.184.215.14"), ("93.184.215.14", "10.0.0.1"), ("93.184.215.14", "::1")],
)
async def test_a_name_of_which_one_address_is_private_is_refused(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever the connection would go to."""

    async def resolve(host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, port)) for each in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(ForbiddenError, match="an address that is not public"):
        await _fetcher("one.example").fetch_url("https://one.example/clip.mp4", _count)


async def test_a_name_is_looked_up_once_and_the_connection_goes_where_it_led(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second look-up might lead elsewhere."""
    hosts = []

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndata")

    async def resolve(host: str, port: int, **_: object) -> list[Any]:
        hosts.append(host)
        address = "127.0.0.1" if len(hosts) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))]

    fetcher = _fetcher("one.example", **_LOCAL)
    async with _answering(answer) as url:
        port = url.rpartition(":")[2]
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
            assert await fetcher.fetch_url(f"http://one.example:{port}/", _count) == b"data"
    assert [host for host in hosts if host == "one.example"] == ["one.example"]
    await fetcher.close()


async def test_a_fetch_says_who_fetches_and_leaves_nothing_for_the_next_one() -> None:
    heads = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        cookie = b"set-cookie: id=1; path=/; domain=127.0.0.1\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + cookie + b"Content-Length: 4\r\n\r\ndata")

    fetcher = _fetcher("127.0.0.1", **_LOCAL)
    async with serving(answer) as port:
        for _ in range(2):
            await fetcher.fetch_url(f"http://127.0.0.1:{port}/", _count)
    await fetcher.close()
    assert heads[0] == heads[1] and "cookie" not in heads[0]
    assert re.search(r"user-agent: hippo/\S+ \(\+https://\S+/\)\r\n", heads[0])
    assert "accept-encoding: identity\r\n" in heads[0]


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "aws-chunked"])
async def test_a_compressed_reply_is_refused_by_name(encoding: str) -> None:
    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Encoding: {encoding}\r\n\r\n"
        writer.write(head.encode() + b"data")

    fetcher = _fetcher("127.0.0.1", **_LOCAL)
    async with _answering(answer) as url:
        if encoding == "aws-chunked":  # no compression
            assert await fetcher.fetch_url(url, _count) == b"data"
        else:
            with pytest.raises(MediaError, match=f"is compressed .{encoding.lower()}."):
                await fetcher.fetch_url(url, _count)
    await fetcher.close()
