"""A gRPC server with health, reflection, limits and TLS."""

import ipaddress
import logging

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hippo.errors import UnavailableError
from hippo.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, TlsFiles, server_options

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_log = logging.getLogger(__name__)
_grpc_log = logging.getLogger("grpc._cython.cygrpc")


class RpcServer:
    """A gRPC server for one service, whose servicer the caller registers with ``server``.

    Health is NOT_SERVING, for the service and for the whole server, until ``set_serving(True)``.
    """

    def __init__(
        self,
        service_name: str,
        *,
        tls: TlsFiles | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        has_reflection: bool = False,
    ) -> None:
        _grpc_log.addFilter(is_news)
        self.server = grpc.aio.server(options=server_options(max_message_bytes))
        self._service_name = service_name
        self._tls = tls
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        if has_reflection:
            names = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.server)

    async def start(self, host: str, port: int) -> int:
        """Binds and starts; returns the port, which the system chooses for port 0.

        Raises UnavailableError when the port cannot be bound.
        """
        await self.set_serving(False)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = self.server.add_insecure_port(address)
            else:
                credentials = self._tls.server_credentials()
                bound = self.server.add_secure_port(address, credentials)
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise UnavailableError(
                f"cannot listen on {address}: the port is taken or the address is not this "
                "machine's; choose another with --port (0: any free one)"
            )
        await self.server.start()
        if self._tls is None and not _is_loopback(host):
            _log.warning(
                "no TLS: whoever reaches port %d of %s may use the model and read what is sent; "
                "let only the gateway reach the port, or set --tls-cert, --tls-key and --tls-ca",
                bound,
                host,
            )
        return bound

    async def set_serving(self, is_serving: bool) -> None:
        """Sets the health status, and notifies its watchers."""
        status = _SERVING if is_serving else _NOT_SERVING
        await self._health.set("", status)
        await self._health.set(self._service_name, status)

    async def stop(self) -> None:
        """Refuses new calls and ends running ones."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(0.0)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_news(record: logging.LogRecord) -> bool:
    """Filters gRPC's log: False for the traceback of a status that the client did not receive.

    A client may be killed while the server sends its call's status. gRPC logs this as an error of
    the servicer; this filter replaces it by a debug record.
    """
    error = record.exc_info[1] if record.exc_info else None
    if "SendStatusFromServerOperation" not in str(error):
        return True
    _log.debug("a client left before it had the status of its call")
    return False
