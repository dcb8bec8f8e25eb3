"""The draft's gRPC face: decodes and orders requests, encodes what the engine says."""

from __future__ import annotations

from typing import Any

from hippo.engine.host import Backend, ServiceHost
from hippo.engine.service import EngineService
from hippo.engine.slots import Reservation
from hippo.engine.streams import SequenceStreams
from hippo.errors import InvalidRequestError
from hippo.rpc import codec, convert
from hippo.rpc.client import DRAFT_SERVICE
from hippo.rpc.errors import Context, answering_errors
from hippo.types import Block, Commit, OpenRequest, Pace, PromptInfo, Selection, Timing
from hippo.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from services.draft.config import DraftSettings
from services.draft.sequence import DraftSequence


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """DraftService over an engine that the host hands out."""

    def __init__(self, host: ServiceHost, *, max_guessed: int = 0) -> None:
        self._host = host
        self._streams = _DraftStreams(host, max_guessed)

    @answering_errors
    async def Draft(  # type: ignore[override]
        self, _: Any, context: Context
    ) -> None:
        await self._streams.serve(context)

    @answering_errors
    async def GetModel(
        self, _: common_pb2.GetModelRequest, context: Context
    ) -> common_pb2.GetModelResponse:
        response: common_pb2.GetModelResponse = codec.encode(self._host.info)
        return response


def build_service(settings: DraftSettings) -> EngineService:
    """The service with its servicer registered; needs a running event loop."""
    service = EngineService(
        DRAFT_SERVICE,
        reuse=settings.reuse,
        max_waiting=0,
        media_cache_bytes=settings.media_cache_bytes,
        tls=settings.tls,
        max_message_bytes=settings.max_message_bytes,
    )
    draft_pb2_grpc.add_DraftServiceServicer_to_server(
        DraftServicer(service.host, max_guessed=settings.max_guessed), service.rpc.server
    )
    return service


class _DraftStreams(SequenceStreams[DraftSequence]):
    def __init__(self, host: ServiceHost, max_guessed: int) -> None:
        super().__init__(host)
        self._max_guessed = max_guessed

    def new_sequence(self, request: OpenRequest, reservation: Reservation) -> DraftSequence:
        return DraftSequence(request, reservation, max_guessed=self._max_guessed)

    def take(
        self,
        sequence: DraftSequence,
        request: draft_pb2.DraftRequest,
        backend: Backend,
    ) -> Block | Commit | Pace | Selection:
        kind = request.WhichOneof("message")
        if kind is None:
            raise InvalidRequestError("an empty message; expected select, pace or commit")
        if kind == "open":
            raise InvalidRequestError("open came twice; one stream is one sequence", param="open")
        if kind == "select":
            if sequence.has_select:
                raise InvalidRequestError("select came twice; it is sent once", param="select")
            sequence.has_select = True
        return convert.from_stream(request, num_token_ids=backend.info.num_token_ids)

    def encode(self, message: Block | Timing | PromptInfo) -> draft_pb2.DraftResponse:
        return codec.wrap(draft_pb2.DraftResponse, message)
