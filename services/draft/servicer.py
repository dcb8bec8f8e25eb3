"""Assembles the draft service."""

from functools import partial
from typing import Any

from hippo.rpc.client import DRAFT_METHOD, DRAFT_SERVICE
from hippo.service.service import EngineService
from hippo.service.streams import SequenceStreams
from hippo.speculation.sharpness import SharpnessByTemperature
from hippo.v1 import draft_pb2, draft_pb2_grpc
from services.draft.config import DraftSettings
from services.draft.room import FeatureRoom
from services.draft.sequence import DraftSequence


def build_service(settings: DraftSettings) -> EngineService:
    """Returns the service with its servicer registered; needs a running event loop."""
    service = EngineService(DRAFT_SERVICE, settings, max_waiting=0)
    make_sequence = partial(
        DraftSequence,
        max_guessed=settings.max_guessed,
        room=FeatureRoom(),
        sharpnesses=SharpnessByTemperature(),
    )
    servicer: Any = SequenceStreams(service, DRAFT_METHOD, draft_pb2.DraftResponse, make_sequence)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, service.rpc.server)
    return service
