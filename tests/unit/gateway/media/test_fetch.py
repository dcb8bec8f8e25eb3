"""Which URLs are fetched, and what may go wrong."""

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

Fetch = Callable[[str], Awaitable[bytes]]
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
DATA = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndata"
IN_TESTS = {"allow_http_media": True, "allow_private_media_addresses": True}


def _fetcher(*domains: str, **settings: Any) -> UrlFetcher:
    target = ("localhost:1",)
    return UrlFetcher(GatewaySettings(target=target, allowed_media_domains=domains, **settings))


async def _fetch(fetcher: UrlFetcher, url: str) -> bytes:
    return await fetcher.fetch_url(url, lambda num_bytes: None)


@asynccontextmanager
async def _fetching(
    answer: Answer | bytes, domain: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[Fetch]:
    """Fetches a path of a server that lets ``answer`` write for the head of each request, or writes
    it."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if isinstance(answer, bytes):
            writer.write(answer)
        else:
            await answer(head.decode(), writer)

    fetcher = _fetcher(domain, **IN_TESTS, **settings)
    async with serving(handle) as port:
        yield lambda path: _fetch(fetcher, f"http://{domain}:{port}/{path}")
    await fetcher.close()


def _resolve(patch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Every name leads to the addresses, without any to nothing; returns the names asked for."""
    asked: list[str] = []

    async def resolve(host: str | bytes, port: int, **_: object) -> list[Any]:
        asked.append(host if isinstance(host, str) else host.decode())
        if not addresses:
            raise OSError
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, port)) for each in addresses]

    patch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    return asked


@pytest.mark.parametrize(
    ("domain", "url", "expected"),
    [
        ("media.example", "http://media.example/clip.mp4", "scheme is 'http'"),
        ("media.example", "https://user:secret@media.example/clip.mp4", "credentials"),
        ("media.example", "https://media.example@evil.example/clip.mp4", "credentials"),
        *(
            ("media.example", f"https://{host}/clip.mp4", "not on this server's list")
            for host in (
                "other.example",
                "media.example.evil",
                "evilmedia.example",
                "cdn.media.example",
                "127.0.0.1",
            )
        ),
        ("*.media.example", "https://media.example/clip.mp4", "not on this server's list"),
        ("*.media.example", "https://evilmedia.example/clip.mp4", "not on this server's list"),
        *(
            (host.strip("[]"), f"https://{host}/clip.mp4", "an address that is not public")
            for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254")
        ),
    ],
)
async def test_a_url_off_the_list_is_not_fetched(domain: str, url: str, expected: str) -> None:
    with pytest.raises(ForbiddenError, match=expected):
        await _fetch(_fetcher(domain), url)


def test_what_counts_as_a_public_address() -> None:
    public = ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::5db8:d70e")
    others = """
        127.0.0.1 0.0.0.0 10.1.2.3 100.64.0.1 169.254.169.254 224.0.0.1 192.88.99.1 192.0.0.8
        198.18.0.1 ::1 :: fe80::1%eth0 fd00::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1::
        64:ff9b:1::5db8:d70e ::ffff:93.184.215.14 ::ffff:0:93.184.215.14 ::93.184.215.14
        2001:0:5db8:d70e::1 fec0::1 5f00::1 3fff::1 no-address
    """.split()
    assert [each for each in (*public, *others) if is_public_address(each)] == [*public]


async def test_a_connection_whose_certificate_is_one_hosts_is_not_used_for_another(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(DATA)

    monkeypatch.setattr(certifi, "where", lambda: str(pki / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pki / "service.pem", pki / "service.key")
    fetcher = _fetcher("one.example", "two.example", **IN_TESTS)
    async with serving(answer, context) as port:
        with monkeypatch.context() as patched:
            _resolve(patched, "127.0.0.1")
            for _ in range(2):
                assert await _fetch(fetcher, f"https://one.example:{port}/clip.mp4") == b"data"
            with pytest.raises(MediaError, match="certificate"):
                await _fetch(fetcher, f"https://two.example:{port}/clip.mp4")
        await fetcher.close()


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a.example:99999/", "http://" + "é" * 70 + ".example/"]
)
async def test_a_malformed_url_is_the_callers_mistake(url: str) -> None:
    with pytest.raises(MediaError):
        await _fetch(_fetcher("*.example", **IN_TESTS), url)


async def test_a_domain_of_other_letters_is_allowed_by_either_of_its_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = _resolve(monkeypatch)
    for domain in ("*.Müller.example", "*.xn--mller-kva.example"):
        for host in ("a.müller.example", "a.xn--mller-kva.example."):
            with pytest.raises(MediaError, match="cannot be resolved"):
                await _fetch(_fetcher(domain), f"https://{host}/clip.mp4")
    assert asked == ["a.xn--mller-kva.example"] * 4


@pytest.mark.parametrize(
    ("location", "error", "words"),
    [
        ("", MediaError, "status 302"),
        ("Location: http://[::1\r\n", MediaError, "cannot be fetched"),
        ("Location: http:////].[h+\r\n", MediaError, "an address that is malformed"),
        ("Location: http://a.example/clip.mp4\r\n", ForbiddenError, "'a.example' is not on this"),
        ("Location: http://localhost/clip.mp4\r\n", ForbiddenError, "'localhost' is not on this"),
    ],
)
async def test_redirects_that_lead_nowhere_or_elsewhere_are_the_urls_fault(
    location: str, error: type[Exception], words: str
) -> None:
    answer = f"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n{location}\r\n"
    async with _fetching(answer.encode()) as fetch:
        with pytest.raises(error, match=words):
            await fetch("clip.mp4")
        with pytest.raises(MediaError):
            await fetch("x" * 70_000)
        with pytest.raises(MediaError, match="cannot be sent"):
            await fetch("\ud800")


async def test_a_url_that_is_not_there_is_told() -> None:
    async with _fetching(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone") as fetch:
        with pytest.raises(MediaError, match="status 404"):
            await fetch("missing.mp4")


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_file_is_at_most_as_large_as_the_operator_allows(is_declared: bool) -> None:
    """Whether the server tells its size or not."""

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        data = bytes(int(head.split()[1].strip("/")))
        length = b"Content-Length: %d\r\n" % len(data) if is_declared else b""
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"Connection: close\r\n\r\n" + data)

    async with _fetching(answer, max_media_bytes=1000) as fetch:
        assert await fetch("1000") == bytes(1000)
        with pytest.raises(MediaError, match="larger than 1000 bytes"):
            await fetch("1001")


@pytest.mark.parametrize(
    ("pause_s", "words"),
    [(0.0, "larger than 10000 bytes"), (0.02, r"took longer than 0\.5 s, this server's limit")],
)
async def test_a_file_without_end_is_read_no_further_than_the_limits(
    pause_s: float, words: str
) -> None:
    """Though no piece is late."""

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(bytes(1 if pause_s else 1000))
            await writer.drain()
            await asyncio.sleep(pause_s)

    async with _fetching(answer, max_media_bytes=10_000, media_timeout_s=0.5) as fetch:
        with pytest.raises(MediaError, match=words):
            await fetch("")


async def test_three_redirects_are_followed_and_a_fourth_is_not() -> None:
    asked = []

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        asked.append(num_left := int(head.split()[1].strip("/")))
        there = f"HTTP/1.1 302 Found\r\nLocation: /{num_left - 1}\r\nContent-Length: 0\r\n\r\n"
        writer.write(there.encode() if num_left else DATA)

    async with _fetching(answer) as fetch:
        assert await fetch("3") == b"data"
        assert asked == [3, 2, 1, 0]
        with pytest.raises(MediaError, match="redirects more than 3 times"):
            await fetch("4")
        assert asked[4:] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    "addresses", ["10.0.0.1 93.184.215.14", "93.184.215.14 10.0.0.1", "93.184.215.14 ::1"]
)
async def test_a_name_of_which_one_address_is_private_is_refused(
    addresses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever the connection would go to."""
    _resolve(monkeypatch, *addresses.split())
    with pytest.raises(ForbiddenError, match="an address that is not public"):
        await _fetch(_fetcher("one.example"), "https://one.example/clip.mp4")


async def test_a_name_is_looked_up_once_and_the_connection_goes_where_it_led(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second look-up might lead elsewhere."""
    async with _fetching(DATA, "one.example") as fetch:
        with monkeypatch.context() as patched:
            asked = _resolve(patched, "127.0.0.1")
            assert await fetch("") == b"data"
    assert asked.count("one.example") == 1


async def test_a_fetch_says_who_fetches_and_leaves_nothing_for_the_next_one() -> None:
    heads = []

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        writer.write(
            DATA.replace(b"\r\n", b"\r\nset-cookie: id=1; path=/; domain=127.0.0.1\r\n", 1)
        )

    async with _fetching(answer) as fetch:
        assert [await fetch("") for _ in range(2)] == [b"data"] * 2
    assert heads[0] == heads[1] and "cookie" not in heads[0]
    assert re.search(r"user-agent: hippo/\S+ \(\+https://\S+/\)\r\n", heads[0])
    assert "accept-encoding: identity\r\n" in heads[0]


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "aws-chunked"])
async def test_a_compressed_reply_is_refused_by_name(encoding: str) -> None:
    answer = DATA.replace(b"\r\n", f"\r\nContent-Encoding: {encoding}\r\n".encode(), 1)
    async with _fetching(answer) as fetch:
        if encoding == "aws-chunked":  # no compression
            assert await fetch("") == b"data"
        else:
            with pytest.raises(MediaError, match=f"is compressed .{encoding.lower()}."):
                await fetch("")
