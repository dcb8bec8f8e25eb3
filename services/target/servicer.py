"""The target's gRPC face: decodes and orders requests, encodes what the engine says."""

from __future__ import annotations

from typing import Any, cast

from hippo.engine.host import Backend, ServiceHost
from hippo.engine.service import EngineService
from hippo.engine.slots import Reservation
from hippo.engine.streams import SequenceStreams
from hippo.errors import InvalidRequestError
from hippo.models.base import Prompt
from hippo.pruning.select import SelectionOptions
from hippo.rpc import codec, convert
from hippo.rpc.client import TARGET_SERVICE
from hippo.rpc.errors import Context, answering_errors
from hippo.types import (
    Block,
    Commit,
    OpenRequest,
    Pace,
    PromptInfo,
    Selection,
    SpatialScore,
    Verdict,
)
from hippo.v1 import common_pb2, target_pb2, target_pb2_grpc
from services.target.config import TargetSettings
from services.target.selection import needs_scores, select_without_scores
from services.target.sequence import Scoring, TargetSequence


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """TargetService over an engine that the host hands out."""

    def __init__(self, host: ServiceHost, scoring: Scoring) -> None:
        self._host = host
        self._streams = _VerifyStreams(host, scoring)

    @answering_errors
    async def Verify(  # type: ignore[override]
        self, _: Any, context: Context
    ) -> None:
        await self._streams.serve(context)

    @answering_errors
    async def GetModel(
        self, _: common_pb2.GetModelRequest, context: Context
    ) -> common_pb2.GetModelResponse:
        response: common_pb2.GetModelResponse = codec.encode(self._host.info)
        return response


def build_service(settings: TargetSettings) -> EngineService:
    """The service with its servicer registered; needs a running event loop."""
    spatial = cast(SpatialScore, settings.spatial_score)
    options = SelectionOptions(spatial=spatial, spread=settings.spread)
    scoring = Scoring(settings.score_layers, options)
    service = EngineService(
        TARGET_SERVICE,
        reuse=settings.reuse,
        check_model=scoring.layers_of,
        max_waiting=settings.max_queue,
        media_cache_bytes=settings.media_cache_bytes,
        tls=settings.tls,
        max_message_bytes=settings.max_message_bytes,
    )
    target_pb2_grpc.add_TargetServiceServicer_to_server(
        TargetServicer(service.host, scoring), service.rpc.server
    )
    return service


class _VerifyStreams(SequenceStreams[TargetSequence]):
    def __init__(self, host: ServiceHost, scoring: Scoring) -> None:
        super().__init__(host)
        self._scoring = scoring

    def check(self, request: OpenRequest) -> None:
        if request.committed_ids:
            raise InvalidRequestError(
                "committed_ids is for a draft that joins; the target begins at token 0",
                param="committed_ids",
            )

    def new_sequence(self, request: OpenRequest, reservation: Reservation) -> TargetSequence:
        return TargetSequence(request, reservation, scoring=self._scoring)

    def announce(self, sequence: TargetSequence, prompt: Prompt) -> None:
        """A choice that needs no scores goes out before any device work; the engine says others."""
        pruning = sequence.request.pruning
        if not needs_scores(pruning, int(prompt.visual_indices.shape[0])):
            sequence.output.put(select_without_scores(pruning, prompt))

    def take(
        self,
        sequence: TargetSequence,
        request: target_pb2.VerifyRequest,
        backend: Backend,
    ) -> Block | Commit | Pace | Selection:
        kind = request.WhichOneof("message")
        if kind is None:
            raise InvalidRequestError("an empty message; expected pace or verify")
        if kind == "open":
            raise InvalidRequestError("open came twice; one stream is one sequence", param="open")
        return convert.from_stream(request, num_token_ids=backend.info.num_token_ids)

    def encode(self, message: Verdict | Selection | PromptInfo) -> target_pb2.VerifyResponse:
        return codec.wrap(target_pb2.VerifyResponse, message)
