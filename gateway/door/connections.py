"""Bounds connections in all and from one address, and the time for a request's head."""

import asyncio
import logging
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("gateway")

HEAD_S = 20.0  # a head has some kilobytes; a minute is for bodies
_END = b"content-length: 0\r\nconnection: close\r\n\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n" + _END
_LATE = b"HTTP/1.1 408 Request Timeout\r\n" + _END


class ConnectionLimit:
    """At most ``most`` connections, and half of them from one address."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._addresses = Counter[str]()

    def enter(self, address: str) -> bool:
        """Counts a connection; returns False, and counts nothing, if there is no room for it."""
        is_full = self._addresses.total() >= self._most
        if is_full or self._addresses[address] >= max(self._most // 2, 1):
            return False
        self._addresses[address] += 1
        return True

    def leave(self, address: str) -> None:
        """Takes back what ``enter`` has counted."""
        self._addresses[address] -= 1
        if not self._addresses[address]:
            del self._addresses[address]


def bounded_protocol(limit: ConnectionLimit, *, head_s: float = HEAD_S) -> type[H11Protocol]:
    """Returns uvicorn's protocol within ``limit``, where a request's head has come whole after
    ``head_s`` seconds from the connection or from the head's first byte."""

    class BoundedProtocol(H11Protocol):
        _address: str | None = None  # counted as one of its connections
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            address = self.client[0] if self.client else ""
            if not limit.enter(address):
                transport.write(_FULL)
                transport.close()
                return
            self._address = address
            self._late = self.loop.call_later(head_s, self._end_late)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_clock()
            if self._address is not None:
                limit.leave(self._address)

        def data_received(self, data: bytes) -> None:
            if self._address is None:
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_clock()
            elif self._late is None and not self.transport.is_closing():
                self._late = self.loop.call_later(head_s, self._end_late)

        def _stop_clock(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _end_late(self) -> None:
            self._late = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_LATE)
                self.transport.close()

    return BoundedProtocol


def most_connections(wanted: int) -> int:
    """Returns how many of the ``wanted`` connections this process may have, after raising its soft
    limit of descriptors to the hard one: each connection may hold a file beside its socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or wanted <= hard // 2:
        return wanted
    logger.warning(
        "--max-connections is %d, but the process may open %d files: it takes %d connections; "
        "raise the limit (ulimit -n)",
        wanted,
        hard,
        hard // 2,
    )
    return hard // 2
