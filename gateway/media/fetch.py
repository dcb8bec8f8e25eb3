"""Fetches media over http(s) without giving clients access to the operator's network (SSRF)."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from gateway.common.config import GatewaySettings
from gateway.media.uploads import too_large
from hippo.errors import ForbiddenError, MediaError
from hippo.version import ADDRESS, distribution_version

_MAX_REDIRECTS = 3
_COMPRESSED = ("gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What ``is_global`` of Python 3.11 to 3.14 does not exclude everywhere.
_NOT_PUBLIC = [
    ipaddress.ip_network(each)
    for each in (
        "::/96",  # IPv4-compatible, RFC 4291
        "::ffff:0:0/96",  # IPv4-mapped
        "::ffff:0:0:0/96",  # IPv4-translated, RFC 2765
        "64:ff9b:1::/48",  # NAT64 of the local network, RFC 8215
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation, RFC 9637
        "5f00::/16",  # segment routing, RFC 9602
        "fec0::/10",  # site-local, RFC 3879
        "192.0.0.0/24",  # for protocols, RFC 6890
        "192.88.99.0/24",  # 6to4 relays, RFC 7526
    )
]


class UrlFetcher:
    """Fetches from domains on an allow-list.

    Each hop of a redirect is checked like the first URL. A host name is resolved once, all its
    addresses are checked, and the connection goes to a checked address, so that a second look-up
    cannot return another address. Each request has its own connection, and its certificate must be
    valid for the host name.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        # In the ASCII form (IDNA) that DNS and certificates use; a dot first stands for subdomains.
        self._allowed_domains = tuple(
            "." * each.startswith("*.") + httpx.URL(host=each.removeprefix("*.")).raw_host.decode()
            for each in (domain.rstrip(".") for domain in settings.allowed_media_domains)
        )
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
                hop = httpx.URL(url)
                for _ in range(_MAX_REDIRECTS + 1):
                    result = await self._fetch_hop(hop, count_bytes)
                    if isinstance(result, bytes):
                        return result
                    hop = hop.join(result)
        except TimeoutError:
            raise MediaError(
                f"fetching the URL took longer than {self._timeout_s:g} s, this server's limit"
            ) from None
        except UnicodeError:
            raise MediaError("the URL has characters that cannot be sent") from None
        except ValueError:  # joining a redirect's address
            raise MediaError("the URL redirects to an address that is malformed") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise MediaError(f"the URL cannot be fetched: {reason}") from None
        raise MediaError(f"the URL redirects more than {_MAX_REDIRECTS} times")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _fetch_hop(self, url: httpx.URL, count_bytes: Callable[[int], None]) -> bytes | str:
        """Returns the body (bytes), or the location of a redirect (str)."""
        host = self._checked_host(url)
        address = await self._resolve(host)
        if self._client is None:
            # trust_env: proxies and credentials of the environment are not for clients' URLs.
            # The jar takes no cookie: one client's fetch must not change another's.
            # Connections are not reused: httpx pools them by address, one address can serve several
            # host names, and the certificate was checked for the first name only.
            self._client = httpx.AsyncClient(
                trust_env=False,
                timeout=self._timeout_s,
                limits=httpx.Limits(max_connections=100, max_keepalive_connections=0),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            )
        async with self._client.stream(
            "GET",
            url.copy_with(host=address),
            headers={
                "Host": url.copy_with(host=host).netloc.decode(),
                "User-Agent": f"hippo/{distribution_version()} (+{ADDRESS})",
                "Accept-Encoding": "identity",  # videos are compressed already
            },
            # The certificate is checked for the host name, not for the address.
            extensions={"sni_hostname": host} if url.scheme == "https" else None,
        ) as response:
            if response.has_redirect_location:
                return response.headers["location"]
            if response.status_code != 200:
                raise MediaError(f"the URL answered with status {response.status_code}")
            declared = response.headers.get("content-length", "")
            if declared.isdigit() and int(declared) > self._max_bytes:
                raise too_large("URL's file", self._max_bytes)
            # Servers also send values that name no compression, such as utf-8.
            encoding = response.headers.get("content-encoding", "").strip().lower()
            if encoding in _COMPRESSED:
                raise MediaError(
                    f"the URL's reply is compressed ({encoding}), which was not asked for; the "
                    "server at the URL must send the file as it is"
                )
            body = bytearray()
            async for piece in response.aiter_raw():
                count_bytes(len(piece))
                body += piece
                if len(body) > self._max_bytes:
                    raise too_large("URL's file", self._max_bytes)
            return bytes(body)

    def _checked_host(self, url: httpx.URL) -> str:
        """Returns the host's name in ASCII; raises ForbiddenError for a URL that is not allowed."""
        if url.scheme not in self._schemes:
            raise ForbiddenError(
                f"the URL's scheme is {url.scheme!r}; this server fetches "
                f"{' and '.join(self._schemes)}"
            )
        if not url.host or (url.port or 0) > 65535:
            raise MediaError("the URL has no host, or a port above 65,535")
        if url.userinfo:
            raise ForbiddenError("the URL holds credentials; this server sends none")
        host = url.raw_host.decode().rstrip(".")
        domains = self._allowed_domains
        if not any(host == each or (each[0] == "." and host.endswith(each)) for each in domains):
            raise ForbiddenError(f"the URL's host {host!r} is not on this server's list")
        return host

    async def _resolve(self, host: str) -> str:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise MediaError(f"the URL's host {host!r} cannot be resolved") from None
        addresses = [str(sockaddr[0]) for *_, sockaddr in found]
        if not (self._allow_private_addresses or all(map(is_public_address, addresses))):
            raise ForbiddenError(f"the URL's host {host!r} has an address that is not public")
        return addresses[0]


def is_public_address(address: str) -> bool:
    """Whether an address is public.

    An IPv6 address that embeds an IPv4 address is public only under NAT64's public prefix, by which
    networks without IPv4 reach the others, and only if the embedded address is public.
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
