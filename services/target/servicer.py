"""Assembles the target service."""

from functools import partial
from typing import Any

from hippo.pruning.select import SelectionOptions
from hippo.rpc.client import TARGET_SERVICE, VERIFY_METHOD
from hippo.service.service import EngineService
from hippo.service.streams import SequenceStreams
from hippo.types import SpatialScore
from hippo.v1 import target_pb2, target_pb2_grpc
from services.target.config import TargetSettings
from services.target.sequence import Scoring, TargetSequence


def build_service(settings: TargetSettings) -> EngineService:
    """Returns the service with its servicer registered; needs a running event loop."""
    options = SelectionOptions(SpatialScore(settings.spatial_score), spread=settings.spread)
    scoring = Scoring(settings.score_layers, options)
    service = EngineService(
        TARGET_SERVICE, settings, max_waiting=settings.max_queue, num_tapped=scoring.num_layers_for
    )
    make_sequence = partial(TargetSequence, scoring=scoring)
    servicer: Any = SequenceStreams(
        service, VERIFY_METHOD, target_pb2.VerifyResponse, make_sequence
    )
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, service.rpc.server)
    return service
