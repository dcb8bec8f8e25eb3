"""The draft's gRPC face."""

from __future__ import annotations

from functools import partial
from typing import Any

from hippo.engine.service import EngineService
from hippo.engine.streams import SequenceStreams
from hippo.rpc.client import DRAFT_SERVICE
from hippo.rpc.errors import Context, answering_errors
from hippo.v1 import draft_pb2, draft_pb2_grpc
from services.draft.config import DraftSettings
from services.draft.sequence import DraftSequence


class DraftServicer(SequenceStreams, draft_pb2_grpc.DraftServiceServicer):
    """DraftService over the service's engine."""

    @answering_errors
    async def Draft(  # type: ignore[override]
        self, _: Any, context: Context
    ) -> None:
        await self.serve(context)


def build_service(settings: DraftSettings) -> EngineService:
    """The service with its servicer registered; needs a running event loop."""
    service = EngineService(DRAFT_SERVICE, settings, max_waiting=0)
    servicer = DraftServicer(
        service,
        draft_pb2.DraftResponse,
        partial(DraftSequence, max_guessed=settings.max_guessed),
    )
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, service.rpc.server)
    return service
