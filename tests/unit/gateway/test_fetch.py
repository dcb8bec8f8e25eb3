"""Which URLs are fetched, and what may go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import certifi
import pytest

from gateway.config import GatewaySettings
from gateway.fetch import UrlFetcher, is_public_address
from hippo.errors import ForbiddenError, MediaError


def _fetcher(*domains: str, allow_http: bool = False, allow_private: bool = False) -> UrlFetcher:
    settings = GatewaySettings(
        target=("localhost:1",),
        allowed_media_domains=domains,
        allow_http_media=allow_http,
        allow_private_media_addresses=allow_private,
    )
    return UrlFetcher(settings)


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
