"""GET /docs: what the server answers, as a plain page that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Returns the page."""
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
