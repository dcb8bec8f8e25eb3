"""gRPC options and TLS credentials of clients and servers."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from hippo.errors import InvalidRequestError

DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024

DEFAULT_SILENCE_SECONDS = 20.0

# Text and token ids of a message, beside its media. The longest contexts have 131,072 tokens, and
# the longest tokens about 128 characters.
_OTHER_BYTES = 131_072 * 128

_KEEPALIVE_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 10_000
# A health check waits as long: a host whose cores are all taken, or far away, answers in time.
_CONNECT_MS = 5_000

ChannelOptions = tuple[tuple[str, int], ...]

NO_PROXY = ("grpc.enable_http_proxy", 0)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. A server needs ``cert`` and ``key``; with ``ca`` it requires client certificates.

    A client uses ``ca`` (empty: the system's authorities), and for mutual TLS ``cert`` and ``key``.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns a server's credentials; raises InvalidRequestError if a file is missing."""
        if not (self.cert and self.key):
            raise InvalidRequestError("TLS needs both a certificate file and a key file")
        return grpc.ssl_server_credentials(
            [(_read(self.key), _read(self.cert))],
            root_certificates=_read(self.ca) if self.ca else None,
            require_client_auth=bool(self.ca),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns a client's credentials; raises InvalidRequestError if a file is missing."""
        if bool(self.cert) != bool(self.key):
            raise InvalidRequestError("mutual TLS needs both a certificate file and a key file")
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca) if self.ca else None,
            private_key=_read(self.key) if self.key else None,
            certificate_chain=_read(self.cert) if self.cert else None,
        )


def server_options(max_message_bytes: int) -> ChannelOptions:
    """Options that permit pings at any time, and exclude sharing a port between processes;
    ``max_message_bytes`` is the most bytes of a message's media."""
    return (
        *_message_limits(max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
    )


def client_options(max_message_bytes: int, silence_seconds: float) -> ChannelOptions:
    """Options that break a connection if the peer answers no ping within ``silence_seconds``
    (because it hangs or its host is lost), that try again to connect after two seconds at the
    latest, and that use no proxy of the environment, which is for the hub's files."""
    half_ms = max(round(silence_seconds * 500), 1)
    return (
        *_message_limits(max_message_bytes),
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        ("grpc.http2.ping_timeout_ms", half_ms),  # by default a minute, which would prevail
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),  # what one attempt may take
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),
        NO_PROXY,
    )


def _message_limits(max_message_bytes: int) -> ChannelOptions:
    limit = min(max_message_bytes + _OTHER_BYTES, 2**31 - 1)  # protobuf's own limit
    return ("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"TLS file {name}: {error.strerror}") from None
