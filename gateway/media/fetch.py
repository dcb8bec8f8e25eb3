"""Fetches media over http(s) without giving clients access to the operator's network (SSRF)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import zlib
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.parse import urljoin, urlsplit

import httpx

from gateway.common.config import GatewaySettings
from hippo.errors import ForbiddenError, MediaError
from hippo.version import ADDRESS, distribution_version

_MAX_REDIRECTS = 3
_DEFAULT_PORTS = {"http": 80, "https": 443}
_ZLIB, _ANY_HEADER = ("gzip", "x-gzip", "deflate"), 32 + zlib.MAX_WBITS
_OTHER_ENCODINGS = ("br", "zstd", "compress", "x-compress")
_PIECE_BYTES = 1 << 20
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What ``is_global`` of Python 3.11 to 3.14 does not exclude everywhere.
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "::/96",  # IPv4-compatible, RFC 4291
            "::ffff:0:0/96",  # IPv4-mapped
            "::ffff:0:0:0/96",  # IPv4-translated, RFC 2765
            "64:ff9b:1::/48",  # NAT64 of the local network, RFC 8215
            "2001::/32",  # Teredo
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation, RFC 9637
            "5f00::/16",  # segment routing, RFC 9602
            "fec0::/10",  # site-local, RFC 3879
            "192.0.0.0/24",  # of protocols, RFC 6890
            "192.88.99.0/24",  # 6to4 relays, RFC 7526
        ),
    )
)
# Connections are not reused: httpx pools them by address, one address can serve several host names,
# and the certificate was checked for the first name only.
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=0)


class UrlFetcher:
    """Fetches from domains on an allow-list.

    Each hop of a redirect is checked like the first URL. A host name is resolved once, all its
    addresses are checked, and the connection goes to a checked address, so that a second look-up
    cannot return another address. Each request has its own connection, and its certificate must be
    valid for the host name.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        names = (domain.lower().rstrip(".") for domain in settings.allowed_media_domains)
        self._allowed_domains = tuple(map(_ascii, names))
        self._schemes = ("https", "http") if settings.allow_http_media else ("https",)
        self._allow_private_addresses = settings.allow_private_media_addresses
        self._timeout_s = settings.media_timeout_s
        self._max_bytes = settings.max_media_bytes
        self._client: httpx.AsyncClient | None = None

    async def fetch_url(self, url: str, count_bytes: Callable[[int], None]) -> bytes:
        """Returns the body, which is held in memory; ``count_bytes`` gets the size of each piece,
        and may raise MediaError. Raises ForbiddenError for a URL not allowed, otherwise MediaError.
        """
        if not self._allowed_domains:
            raise ForbiddenError(
                "this server fetches no URLs (the operator can allow domains with "
                "--allowed-media-domains); send a data: URL"
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(_MAX_REDIRECTS + 1):
                    result = await self._fetch_hop(url, count_bytes)
                    if isinstance(result, bytes):
                        return result
                    url = _joined(url, result)
        except TimeoutError:
            raise MediaError(
                f"fetching the URL took longer than {self._timeout_s:g} s, this server's limit"
            ) from None
        except UnicodeError:
            raise MediaError("the URL has characters that cannot be sent") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise MediaError(f"the URL cannot be fetched: {reason}") from None
        raise MediaError(f"the URL redirects more than {_MAX_REDIRECTS} times")

    async def close(self) -> None:
        """Closes open connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _fetch_hop(self, url: str, count_bytes: Callable[[int], None]) -> bytes | str:
        """Returns the body (bytes), or the location of a redirect (str)."""
        host, port, scheme = self._check_url(url)
        address = await self._resolve(host, port)
        parts = urlsplit(url)
        shown = f"[{address}]" if ":" in address else address
        host_header = f"[{host}]" if ":" in host else host
        if port != _DEFAULT_PORTS[scheme]:
            host_header += f":{port}"
        pinned = parts._replace(netloc=f"{shown}:{port}", fragment="").geturl()
        if self._client is None:
            # trust_env: proxies and credentials of the environment are not for clients' URLs.
            # The jar takes no cookie: one client's fetch must not change another's.
            self._client = httpx.AsyncClient(
                follow_redirects=False,
                trust_env=False,
                timeout=self._timeout_s,
                limits=_LIMITS,
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            )
        request = self._client.build_request(
            "GET",
            pinned,
            headers={
                "Host": host_header,
                "User-Agent": f"hippo/{distribution_version()} (+{ADDRESS})",
                "Accept": "*/*",
                "Accept-Encoding": "identity",  # videos are compressed
            },
            # The certificate is checked for the host name, not for the address.
            extensions={"sni_hostname": host} if scheme == "https" else None,
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.has_redirect_location:
                return response.headers["location"]
            if response.status_code != 200:
                raise MediaError(f"the URL answered with status {response.status_code}")
            declared = response.headers.get("content-length", "")
            if declared.isdigit() and int(declared) > self._max_bytes:
                raise self._too_large()
            body = bytearray()
            content = _Content(response.headers.get("content-encoding", ""))
            num_stored = 0
            async for stored in response.aiter_raw():
                num_stored += len(stored)
                if num_stored > self._max_bytes:
                    raise self._too_large()
                for piece in content.pieces(stored):
                    count_bytes(len(piece))
                    body += piece
                    if len(body) > self._max_bytes:
                        raise self._too_large()
                    await asyncio.sleep(0)  # a compressed piece may be a thousand times as large
            content.check_end()
            return bytes(body)
        finally:
            await response.aclose()

    def _too_large(self) -> MediaError:
        limit = f"{self._max_bytes} bytes, this server's limit (--max-media-bytes)"
        return MediaError(f"the URL's file is larger than {limit}")

    def _check_url(self, url: str) -> tuple[str, int, str]:
        try:
            parts = urlsplit(url)
            host, port, scheme = parts.hostname, parts.port, parts.scheme.lower()
        except ValueError as error:
            raise MediaError(f"the URL is malformed: {error}") from None
        if scheme not in self._schemes:
            raise ForbiddenError(
                f"the URL's scheme is {scheme!r}; this server fetches {' and '.join(self._schemes)}"
            )
        if not host:
            raise MediaError("the URL has no host")
        if parts.username is not None or parts.password is not None:
            raise ForbiddenError("the URL holds credentials; this server sends none")
        host = _ascii(host.rstrip("."))
        if not any(_matches(host, domain) for domain in self._allowed_domains):
            raise ForbiddenError(f"the URL's host {host!r} is not on this server's list")
        return host, port or _DEFAULT_PORTS[scheme], scheme

    async def _resolve(self, host: str, port: int) -> str:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise MediaError(f"the URL's host {host!r} cannot be resolved") from None
        addresses = [str(sockaddr[0]) for *_, sockaddr in found]
        if not self._allow_private_addresses:
            for address in addresses:
                if not is_public_address(address):
                    raise ForbiddenError(
                        f"the URL's host {host!r} has an address that is not public"
                    )
        return addresses[0]


class _Content:
    """Undoes the compression of a reply, which some servers send unasked."""

    def __init__(self, encoding: str) -> None:
        """Raises MediaError for an encoding that cannot be undone."""
        # Servers also send values that name no compression, such as utf-8: those change nothing.
        self._encoding = encoding.strip().lower()
        self._unpacker = zlib.decompressobj(_ANY_HEADER) if self._encoding in _ZLIB else None
        self._has_begun = False
        if self._encoding in _OTHER_ENCODINGS:
            raise MediaError(
                f"the URL's reply is compressed ({self._encoding}), which was not asked for; gzip "
                "and deflate can be read"
            )

    def pieces(self, stored: bytes) -> Iterator[bytes]:
        """Yields the content in pieces of at most 1 MiB; raises MediaError if it is damaged."""
        if self._unpacker is not None and not self._has_begun and stored:
            self._has_begun = True
            if self._encoding != "deflate" and not stored.startswith(b"\x1f"):
                self._unpacker = None  # a file that is stored with a wrong label
            elif self._encoding == "deflate" and stored[0] & 15 != 8:  # no header of zlib's
                self._unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        if self._unpacker is None:
            yield stored
            return
        try:
            while stored:
                if self._unpacker.eof:  # gzip files may be joined, or be filled up with zeros
                    stored = stored.lstrip(b"\0")
                    if not stored:
                        break
                    self._unpacker = zlib.decompressobj(_ANY_HEADER)
                yield self._unpacker.decompress(stored, _PIECE_BYTES)
                stored = self._unpacker.unconsumed_tail or self._unpacker.unused_data
        except zlib.error:
            raise MediaError(
                f"the URL's reply says that it is compressed ({self._encoding}), and is not"
            ) from None

    def check_end(self) -> None:
        """Raises MediaError if the content is not whole."""
        if self._unpacker is not None and not self._unpacker.eof:
            raise MediaError(f"the URL's reply ({self._encoding}) is cut off")


def is_public_address(address: str) -> bool:
    """Whether an address is public.

    Of the IPv6 addresses that embed an IPv4 one only those of NAT64's public prefix can be, by
    which networks without IPv4 reach the others, and only if the embedded one is public.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if parsed in _NAT64:
        return is_public_address(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
    if any(parsed in network for network in _NOT_PUBLIC):
        return False
    return parsed.is_global and not parsed.is_multicast


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise MediaError(f"the URL redirects to one that is malformed: {error}") from None


def _ascii(host: str) -> str:
    """Returns a host name in the ASCII form (IDNA) that DNS and certificates use."""
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        raise MediaError(f"the URL's host {host!r} is no name") from None


def _matches(host: str, domain: str) -> bool:
    if domain.startswith("*."):
        return host.endswith(domain[1:])
    return host == domain
