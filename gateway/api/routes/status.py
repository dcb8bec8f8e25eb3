"""Routes for operators and orchestrators: health, readiness, metrics, version."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from gateway.api.openapi import ANSWERED, answers
from gateway.api.responses import Health, NumUp, Ready, Versions
from gateway.api.state import State
from gateway.common.errors import without_addresses
from hippo.metrics import gateway as own
from hippo.types import PROTOCOL_VERSION

router = APIRouter(tags=["status"])

_FORMATS = ("text/plain", "application/openmetrics-text")
_TEXT = {"schema": {"type": "string"}}


@router.get("/health", responses=answers())
async def health() -> Health:
    """Answers while the gateway's process is alive."""
    return Health()


@router.get("/ready", responses=answers(503))
async def ready(state: State) -> Ready:
    """Reports whether requests can be answered, else 503. A missing draft only costs speed."""
    backends = state.backends
    problem = backends.draft_problem()
    return Ready(
        model=backends.model().name,
        draft="ready" if backends.has_draft else "unavailable",
        draft_problem=problem and without_addresses(problem),
        num_targets=NumUp(up=backends.num_targets_up, all=len(backends.targets)),
        num_drafts=NumUp(up=backends.num_drafts_up, all=len(backends.drafts)),
    )


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses=answers(ok={**ANSWERED, "content": dict.fromkeys(_FORMATS, _TEXT)}),
)
async def metrics(request: Request, state: State) -> Response:
    """Returns the metrics in Prometheus' text format, or as OpenMetrics where that is accepted."""
    backends, shown = state.backends, state.metrics
    shown.keep_targets([target.address for target in backends.targets])
    for target in backends.targets:
        if target.info is not None:
            shown.model(target.info.name)  # creates the model's series
        shown.set_baseline(target.address, target.baseline)
    shown[own.SERVICE_UP].labels("target").set(backends.num_targets_up > 0)
    shown[own.SERVICES_READY].labels("target").set(backends.num_targets_up)
    if state.settings.draft:
        shown[own.SERVICE_UP].labels("draft").set(backends.has_draft)
        shown[own.SERVICES_READY].labels("draft").set(backends.num_drafts_up)
    content, media_type = shown.render(request.headers.get("accept", ""))
    return Response(content, media_type=media_type)


@router.get("/version", responses=answers())
async def version(request: Request) -> Versions:
    """Returns the versions of the software and of the protocol between the services."""
    return Versions(version=request.app.version, protocol_version=PROTOCOL_VERSION)
