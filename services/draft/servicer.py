"""The draft's gRPC face: decodes and orders requests, encodes what the engine says."""

from __future__ import annotations

from typing import Any

from hippo.engine.host import Backend, ServiceHost
from hippo.engine.service import EngineService
from hippo.engine.slots import Reservation
from hippo.engine.streams import SequenceStreams
from hippo.errors import InvalidRequestError
from hippo.rpc import convert
from hippo.rpc import convert_stream as stream_convert
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
        return convert.model_to_proto(self._host.info)


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
    ) -> Commit | Pace | Selection:
        kind = request.WhichOneof("message")
        if kind == "commit":
            return stream_convert.commit_from_proto(
                request.commit, num_token_ids=backend.info.num_token_ids
            )
        if kind == "pace":
            return convert.pace_from_proto(request.pace)
        if kind == "select":
            if sequence.has_select:
                raise InvalidRequestError("select came twice; it is sent once", param="select")
            sequence.has_select = True
            return stream_convert.selection_from_proto(request.select)
        if kind == "open":
            raise InvalidRequestError("open came twice; one stream is one sequence", param="open")
        raise InvalidRequestError("an empty message; expected select, pace or commit")

    def encode(self, message: Block | Timing | PromptInfo) -> draft_pb2.DraftResponse:
        if isinstance(message, Block):
            return draft_pb2.DraftResponse(block=stream_convert.block_to_proto(message))
        if isinstance(message, Timing):
            return draft_pb2.DraftResponse(prefill=stream_convert.timing_to_proto(message))
        return draft_pb2.DraftResponse(prompt=stream_convert.prompt_to_proto(message))
