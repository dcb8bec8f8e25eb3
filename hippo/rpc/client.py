"""Clients of the draft and the target service, with values of hippo.types and HippoErrors."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hippo.base.tasks import start_task
from hippo.base.tracing import current_span
from hippo.errors import HippoError, UnavailableError
from hippo.rpc import codec, convert
from hippo.rpc.errors import code_name, error_from_status
from hippo.rpc.options import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_SILENCE_SECONDS,
    TlsFiles,
    client_options,
)
from hippo.rpc.queue import StreamQueue
from hippo.types import (
    Block,
    Commit,
    Hold,
    ModelInfo,
    OpenRequest,
    Pace,
    PromptInfo,
    Selection,
    Timing,
    Verdict,
)
from hippo.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name

DRAFT_METHOD = f"{DRAFT_SERVICE}/Draft"
VERIFY_METHOD = f"{TARGET_SERVICE}/Verify"

_DESCRIBE_SECONDS = 30.0
_CHECK_SECONDS = 5.0

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

SentT = TypeVar("SentT")
ReceivedT = TypeVar("ReceivedT")


class ClientStream(Generic[SentT, ReceivedT]):
    """One sequence at a service: ``async with`` opens the stream, and its end cancels the stream.

    Iteration ends when the service closes the stream, and raises a HippoError if the stream breaks.
    The stream is a child of the current span, and the service's span is a child of the stream's.
    """

    def __init__(
        self, start: Callable[..., Any], opening: Any, *, peer: str, attributes: dict[str, Any]
    ) -> None:
        """``start(metadata=...)`` begins the call; ``attributes`` are the span's."""
        self._start = start
        self._attributes = attributes
        self._envelope = type(opening)
        self._peer = peer
        self._outgoing: StreamQueue[Any] = StreamQueue()
        self._incoming: StreamQueue[Any] = StreamQueue()
        self._outgoing.put_item(opening)

    async def __aenter__(self) -> "ClientStream[SentT, ReceivedT]":
        self._span = current_span().start_child(
            self._attributes["rpc.method"], kind="client", attributes=self._attributes
        )
        try:
            self._call = self._start(metadata=self._span.headers or None)
        except grpc.aio.UsageError:  # the channel is closed
            problem = f"the {self._peer} is not used any more"
            self._span.end(UnavailableError(problem))
            raise UnavailableError(problem) from None
        self._writer = start_task(self._write_all())
        self._reader = start_task(self._read_all())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.cancel()  # also ends the reader
        self._writer.cancel()
        try:
            await asyncio.gather(
                self._writer, self._reader, self._call.code(), return_exceptions=True
            )
        finally:
            self._span.end(error)

    async def send_message(self, message: SentT) -> None:
        """Queues a message, and returns before gRPC sends the message.

        Drops the message if the service has closed the stream with status OK. Raises a HippoError
        if the stream is broken.
        """
        if self._call.done() and await self._call.code() is not grpc.StatusCode.OK:
            raise await self._error()
        self._outgoing.put_item(codec.wrap(self._envelope, message))

    def __aiter__(self) -> "ClientStream[SentT, ReceivedT]":
        return self

    async def __anext__(self) -> ReceivedT:
        while True:
            envelope = await anext(self._incoming)
            if envelope.WhichOneof("message") is not None:  # else a kind of a later release
                received: ReceivedT = codec.unwrap(envelope)
                return received

    async def _read_all(self) -> None:
        """Reads until the call ends, in a separate task that is never cancelled.

        The iterating task may be cancelled, and grpc.aio never frees the memory of a cancelled read
        (https://github.com/grpc/grpc/issues/43360).
        """
        try:
            while (message := await self._call.read()) is not _EOF:
                self._incoming.put_item(message)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):  # cancelled on either side
            self._incoming.close(await self._error())
        except Exception as error:  # a bug of gRPC
            self._incoming.close(error)
        else:
            self._incoming.close()

    async def _write_all(self) -> None:
        """Writes queued messages until the call ends; iteration raises the call's status.

        A write fails if the service has just closed the stream. ``call.write`` then replaces the
        status, and messages that the service sent before can no longer be read. Therefore all
        messages go to the underlying call, whose failed writes have no such effect.
        """
        try:
            await self._call.wait_for_connection()
            raw_call = self._call._cython_call
            async for message in self._outgoing:
                data = message.SerializeToString()
                del message  # the first one has the media, and the next one may come much later
                await raw_call.send_serialized_message(data)
                del data
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            self._outgoing.close()

    async def _error(self) -> HippoError:
        call = self._call
        return error_from_status(
            await call.code(), await call.details(), await call.trailing_metadata(), peer=self._peer
        )


DraftStream = ClientStream[Hold | Selection | Pace | Commit, PromptInfo | Timing | Block]
TargetStream = ClientStream[Pace | Block, PromptInfo | Hold | Selection | Verdict]


class _ServiceClient:
    """The base of both clients: the channel, health and GetModel."""

    _service_name: str
    _noun: str
    _make_stub: Callable[[grpc.aio.Channel], Any]

    def __init__(
        self,
        address: str,
        tls: TlsFiles | None = None,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        silence_seconds: float = DEFAULT_SILENCE_SECONDS,
        tls_name: str = "",
    ) -> None:
        """Streams break if the peer answers no ping for ``silence_seconds``. The peer's certificate
        must be of ``tls_name`` (empty: of the address)."""
        self.address = address
        self._peer = f"{self._noun} service at {address}"
        options = client_options(max_message_bytes, silence_seconds)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            named = (("grpc.ssl_target_name_override", tls_name),) if tls_name else ()
            self._channel = grpc.aio.secure_channel(
                address, tls.channel_credentials(), options=(*options, *named)
            )
        self._stub = type(self)._make_stub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def get_model(self) -> ModelInfo:
        """Describes the served model; raises IncompatiblePairError for another protocol version."""
        request = common_pb2.GetModelRequest()
        try:
            response = await self._stub.GetModel(request, timeout=_DESCRIBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            told = (error.code(), error.details(), error.trailing_metadata())
            raise error_from_status(*told, peer=self._peer) from None
        return convert.model_from_proto(response, peer=self._peer)

    async def health_problem(self) -> str | None:
        """Returns None if the service is reachable, warm and not draining, otherwise the reason."""
        request = health_pb2.HealthCheckRequest(service=self._service_name)
        try:
            response = await self._health.Check(request, timeout=_CHECK_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return (
                    f"the server there is no {self._noun} service; were the addresses of draft and "
                    "target swapped?"
                )
            return f"{code_name(error.code())}: {error.details() or 'no details'}"
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            return None
        return "it is still loading its model, or is draining"

    async def close(self) -> None:
        """Closes the channel; running streams end."""
        await self._channel.close(None)

    def _stream(
        self, method: str, envelope: type[Any], request: OpenRequest, timeout_s: float | None
    ) -> ClientStream[Any, Any]:
        host, _, port = self.address.rpartition(":")
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "server.address": host,
            "server.port": int(port),
            "hippo.request_id": request.request_id,
            "hippo.choice_index": request.sampling.choice_index,
        }
        opening = envelope(open=convert.open_to_proto(request))
        start = partial(getattr(self._stub, method.rpartition("/")[2]), timeout=timeout_s)
        return ClientStream(start, opening, peer=self._peer, attributes=attributes)


class DraftClient(_ServiceClient):
    """A draft service at ``address`` (host:port)."""

    _service_name = DRAFT_SERVICE
    _noun = "draft"
    _make_stub = draft_pb2_grpc.DraftServiceStub

    def draft(self, request: OpenRequest, *, timeout_s: float | None = None) -> DraftStream:
        """Returns the stream of one drafted sequence, which the service ends after ``timeout_s``.
        Raises InvalidRequestError for values that the protocol cannot represent."""
        return self._stream(DRAFT_METHOD, draft_pb2.DraftRequest, request, timeout_s)


class TargetClient(_ServiceClient):
    """A target service at ``address`` (host:port)."""

    _service_name = TARGET_SERVICE
    _noun = "target"
    _make_stub = target_pb2_grpc.TargetServiceStub

    def verify(self, request: OpenRequest, *, timeout_s: float | None = None) -> TargetStream:
        """Returns the stream of one verified sequence, as ``DraftClient.draft`` does."""
        return self._stream(VERIFY_METHOD, target_pb2.VerifyRequest, request, timeout_s)
