"""What operators and orchestrators ask: health, readiness, metrics, version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from gateway.state import State
from hippo.errors import UnavailableError
from hippo.types import PROTOCOL_VERSION

router = APIRouter(tags=["status"])


@router.get("/health")
async def health() -> dict[str, str]:
    """Whether the gateway itself is alive."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(state: State) -> dict[str, Any]:
    """Whether questions can be answered; 503 while not. A missing draft only slows them down."""
    backends = state.backends
    return {
        "status": "ready",
        "model": backends.model().name,
        "draft": "ready" if backends.has_draft else "unavailable",
        "draft_problem": backends.draft_problem(),
        "num_targets": {"up": backends.num_targets_up, "all": len(backends.targets)},
        "num_drafts": {"up": backends.num_drafts_up, "all": len(backends.drafts)},
    }


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """Metrics for Prometheus."""
    backends, shown = state.backends, state.metrics
    try:
        for info in backends.models:
            shown.model(info.name)  # its series are there before the first request
        target_is_up = True
    except UnavailableError:
        target_is_up = False
    shown.service_up.labels("target").set(target_is_up)
    shown.services_ready.labels("target").set(backends.num_targets_up)
    if backends.drafts:
        shown.service_up.labels("draft").set(backends.has_draft)
        shown.services_ready.labels("draft").set(backends.num_drafts_up)
    return Response(shown.render(), media_type=shown.content_type)


@router.get("/version")
async def version(state: State) -> dict[str, Any]:
    """The versions of the software and of the protocol between the services."""
    return {"version": state.version, "protocol_version": PROTOCOL_VERSION}
