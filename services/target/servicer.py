"""The gRPC servicer of the target service."""

from __future__ import annotations

from functools import partial
from typing import Any

from hippo.pruning.select import SelectionOptions
from hippo.rpc.client import TARGET_SERVICE, VERIFY_METHOD
from hippo.rpc.errors import Context, answering_errors
from hippo.service.service import EngineService
from hippo.service.streams import SequenceStreams
from hippo.types import SpatialScore
from hippo.v1 import target_pb2, target_pb2_grpc
from services.target.config import TargetSettings
from services.target.sequence import Scoring, TargetSequence


class TargetServicer(SequenceStreams, target_pb2_grpc.TargetServiceServicer):
    """Serves TargetService with the engine."""

    @answering_errors
    async def Verify(  # type: ignore[override]
        self, _: Any, context: Context
    ) -> None:
        await self.serve(context, VERIFY_METHOD)


def build_service(settings: TargetSettings) -> EngineService:
    """Returns the service with its servicer registered; needs a running event loop."""
    options = SelectionOptions(SpatialScore(settings.spatial_score), spread=settings.spread)
    scoring = Scoring(settings.score_layers, options)
    service = EngineService(
        TARGET_SERVICE, settings, max_waiting=settings.max_queue, num_tapped=scoring.num_layers_for
    )
    servicer = TargetServicer(
        service, target_pb2.VerifyResponse, partial(TargetSequence, scoring=scoring)
    )
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, service.rpc.server)
    return service
