"""Routes for operators and orchestrators: health, readiness, metrics, version, and /docs."""

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from gateway.api.responses import Health, NumUp, Ready, Versions
from gateway.api.state import State
from gateway.common.errors import without_addresses
from hippo.metrics import gateway as own
from hippo.types import PROTOCOL_VERSION

router = APIRouter(tags=["status"])

_TEXT = {"schema": {"type": "string"}}
_TEXTS: Any = {200: {"content": {"text/plain": _TEXT, "application/openmetrics-text": _TEXT}}}


@router.get("/health")
async def health() -> Health:
    """Answers while the gateway's process is alive."""
    return Health()


@router.get("/ready")
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


@router.get("/metrics", response_class=PlainTextResponse, responses=_TEXTS)
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


@router.get("/version")
async def version(request: Request) -> Versions:
    """Returns the versions of the software and of the protocol between the services."""
    return Versions(version=request.app.version, protocol_version=PROTOCOL_VERSION)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Returns what the server answers, as a plain page that loads nothing."""
    return HTMLResponse("\n".join(_lines(request.app.openapi())))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><h1>{title}</h1>"
    yield f"<p>{escape(document['info']['description'])}</p>"
    yield '<p>All fields of requests and answers: <a href="openapi.json">openapi.json</a>.</p><dl>'
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<dt><code>{method.upper()} {escape(path)}</code>"
            yield f"<dd>{escape(operation.get('description', operation['summary']))}"
    yield "</dl></html>"
