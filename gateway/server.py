"""The gateway's process: listening socket, port file and signals."""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import math
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from gateway.app import create_app
from gateway.common.config import GatewaySettings
from gateway.door.connections import ConnectionLimit, bounded_protocol, most_connections
from hippo.errors import HippoError, UnavailableError

logger = logging.getLogger("gateway")

_LAST_WORDS_S = 3  # to send errors to clients whose answers were cut off


async def serve(settings: GatewaySettings) -> None:
    """Serves until SIGTERM or SIGINT, then waits up to ``shutdown_grace_s`` for answers.

    Raises UnavailableError if the address cannot be bound.
    """
    listener = _bind(settings.host, settings.port)
    patience_is_over = asyncio.Event()
    app = create_app(settings, patience_is_over)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(settings.shutdown_grace_s) + _LAST_WORDS_S,
            ws="none",
            # h11: unlike httptools it bounds the bytes of a request's head.
            http=bounded_protocol(ConnectionLimit(most_connections(settings.max_connections))),
        ),
        settings,
    )
    if app.state.is_open:  # no API keys are set
        warn_if_exposed(*listener.getsockname()[:2])
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.request_exit()
        loop.call_later(settings.shutdown_grace_s, patience_is_over.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()
    logger.info("stopped")


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers: ``serve`` handles signals, for exit code 0."""

    def __init__(self, config: uvicorn.Config, settings: GatewaySettings) -> None:
        super().__init__(config)
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, then logs the bound address and writes the port file."""
        assert sockets is not None
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # objects of the start live on: later collections skip them
        port = sockets[0].getsockname()[1]
        logger.info("listening on %s:%d", self._settings.host, port)
        if self._settings.port_file:
            path = Path(self._settings.port_file)
            partial = path.with_name(path.name + ".partial")
            partial.write_text(f"{port}\n")
            partial.replace(path)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def request_exit(self) -> None:
        """Stops the server after the running answers; a second call stops it at once."""
        logger.info("stopping")
        self.force_exit = self.should_exit
        self.should_exit = True


def warn_if_exposed(address: str, port: int) -> None:
    """Logs a warning if a gateway without API keys listens on more than the loopback interface."""
    if not ipaddress.ip_address(address).is_loopback:
        logger.warning(
            "no API keys are set: whoever reaches port %d of %s may send requests; set keys with "
            "--api-keys-file, or let only trusted clients reach the port",
            port,
            address,
        )


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With an explicit protocol, asyncio sets TCP_NODELAY on each connection: small pieces of a
        # stream are sent without waiting for acknowledgements.
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port with --port"
        ) from None
    listener.setblocking(False)
    return listener


def pin_to_core(core: int) -> None:
    """Pins the process to one core. Raises HippoError if the process may not use the core."""
    try:
        os.sched_setaffinity(0, {core})
    except (OSError, ValueError, OverflowError):
        cores = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise HippoError(f"--cpu-core {core}: this process may run on cores {cores}") from None
