"""What pages of other sites may do here: nothing, unless the operator names their origins.

A browser on the operator's machine reaches the gateway for any page that it shows. A page may send
forms and scripts' requests (which tell their ``Origin``), and it may let a name of its own point to
this machine, which makes the gateway's answers its own (DNS rebinding; the ``Host`` tells).
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.common.errors import RefusedError
from hippo.base.local_files import shorten

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
GUARDS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Headers of all answers but the page's own: browsers must run nothing of the data in them."""


class SiteMiddleware:
    """Refuses foreign hosts and requests of other sites' pages, with RefusedError."""

    def __init__(
        self, app: ASGIApp, *, allowed_hosts: Collection[str], origins: Collection[str]
    ) -> None:
        """``allowed_hosts`` are names without a port, ``*.name`` for subdomains, ``*`` for all,
        beside local names; ``origins`` are the other sites whose pages may send requests, ``*`` for
        all."""
        self._app = app
        self._hosts = frozenset(name.lower() for name in allowed_hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        problem = self._problem(scope["method"], Headers(scope=scope)) if is_http else None
        if problem is not None:
            raise RefusedError(403, problem, "site_not_allowed", type_name="permission_error")
        await self._app(scope, receive, send)

    def _problem(self, method: str, headers: Headers) -> str | None:
        host = headers.get("host", "")
        if not self._is_ours(host):
            return (
                f"the request is for the host {shorten(host)!r}, which is not a name of this "
                "server: use its address, localhost, or a name that the operator gives with "
                "--allowed-hosts"
            )
        origin = headers.get("origin", "")
        site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
        # Browsers say so themselves over TLS, where a proxy may have changed the host.
        is_foreign = bool(origin) and site != "same-origin"
        is_foreign = is_foreign and urlsplit(origin).netloc.lower() != host.lower()
        if method in _READING:
            # A link may lead here; of a request with an origin, CORS says who reads the answer.
            is_foreign = site == "cross-site" and mode == "no-cors" and "*" not in self._origins
        elif {"*", origin} & self._origins:
            return None
        if is_foreign:
            return (
                "a page of another site sent this request "
                f"({shorten(origin or 'without its origin')}); the operator can allow its origin "
                "with --cors-origins"
            )
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header is allowed; only very old clients send none."""
        name = host_name(host)
        if not host or is_local_name(name) or not {"*", name}.isdisjoint(self._hosts):
            return True
        return any(each[:2] == "*." and name.endswith(each[1:]) for each in self._hosts)


def host_name(host: str) -> str:
    """Returns the name in a Host header, in lower case, without the port and the last dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def is_local_name(name: str) -> bool:
    """Whether no other site can own a host name: an IP address, localhost and its subdomains, and
    names without a dot, which are found in the local network only."""
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
