"""The gateway's application: made by a factory, nothing at import time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI

from gateway.backends import Backends
from gateway.baseline import Baseline, Calibration
from gateway.config import GatewaySettings
from gateway.errors import install_error_handlers
from gateway.fetch import UrlFetcher
from gateway.media import MediaReader
from gateway.metrics import GatewayMetrics
from gateway.middleware import RequestMiddleware
from gateway.routes import chat, models, status
from gateway.state import GatewayState
from hippo.rpc.client import DraftClient, TargetClient
from hippo.speculation.estimates import PairTimes
from hippo.types import PROTOCOL_VERSION


def create_app(settings: GatewaySettings) -> FastAPI:
    """An application that connects to its services when it starts."""
    baseline = Baseline()
    metrics = GatewayMetrics(
        baseline,
        max_draft_tokens=settings.max_draft_tokens,
        version=distribution_version(),
        protocol_version=PROTOCOL_VERSION,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        backends = Backends(
            TargetClient(settings.target),
            DraftClient(settings.draft) if settings.draft else None,
        )
        fetcher = UrlFetcher(
            allowed_domains=settings.allowed_media_domains,
            allow_http=settings.allow_http_media,
            allow_private_addresses=settings.allow_private_media_addresses,
            timeout_s=settings.media_timeout_s,
        )
        media = MediaReader(
            fetcher=fetcher,
            allowed_dirs=settings.allowed_media_dirs,
            max_items=settings.max_media_items,
            max_bytes=settings.max_media_bytes,
        )
        app.state.gateway = GatewayState(
            settings=settings,
            backends=backends,
            media=media,
            metrics=metrics,
            baseline=baseline,
            calibration=Calibration(settings.calibration_share, baseline),
            times=PairTimes(),
            version=distribution_version(),
        )
        await backends.start()
        try:
            yield
        finally:
            await backends.close()
            await fetcher.close()

    app = FastAPI(
        title="hippo",
        version=distribution_version(),
        summary="Video large language models, several times faster, losslessly.",
        lifespan=lifespan,
    )
    install_error_handlers(app)
    app.include_router(chat.router)
    app.include_router(models.router)
    app.include_router(status.router)
    app.add_middleware(RequestMiddleware, max_body_bytes=settings.max_body_bytes, metrics=metrics)
    return app


def distribution_version() -> str:
    """The installed distribution's version."""
    try:
        return version("hippo-serve")
    except PackageNotFoundError:  # run from a folder without installation
        return "0+unknown"
