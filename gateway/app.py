"""The gateway's FastAPI application; ``create_app`` builds it, importing has no side effects."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from gateway.api.openapi import ERRORS, describe_api
from gateway.api.routes import chat, models, page, status, tokenize, videos
from gateway.api.state import GatewayState
from gateway.common.budget import ByteBudget
from gateway.common.config import GatewaySettings
from gateway.common.errors import install_error_handlers
from gateway.common.keys import Limits, load_keyring
from gateway.common.metrics import GatewayMetrics
from gateway.door.middleware import KeyMiddleware, RequestMiddleware
from gateway.door.sites import SiteMiddleware
from gateway.media.reader import MediaReader
from gateway.media.uploads import Uploads
from gateway.pairs.backends import Backends
from hippo.base.tasks import cancel_all
from hippo.grammars.trials import GrammarTrials
from hippo.version import distribution_version

_NUM_TEXT_THREADS = 2  # a piece of a long text is never waited for alone


def create_app(settings: GatewaySettings, patience_is_over: asyncio.Event) -> FastAPI:
    """Returns an application that connects to its services when it starts.

    When ``patience_is_over`` is set, each running answer ends with an error.

    Raises SettingsError for unusable API keys.
    """
    keyring = load_keyring(
        settings.api_keys,
        settings.api_keys_file,
        Limits(**{name: getattr(settings, f"key_{name}") for name in Limits.model_fields}),
    )
    metrics = GatewayMetrics(max_draft_tokens=settings.max_draft_tokens)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:  # closes all, the last first, also after an error
            text_threads = ThreadPoolExecutor(_NUM_TEXT_THREADS, thread_name_prefix="texts")
            stack.callback(text_threads.shutdown, cancel_futures=True)
            uploads = Uploads(settings)
            stack.callback(uploads.close)
            media = MediaReader(settings, uploads)
            stack.push_async_callback(media.close)
            backends = Backends(settings)
            stack.push_async_callback(backends.close)
            trials = GrammarTrials()
            stack.push_async_callback(asyncio.to_thread, trials.close)
            app.state.gateway = GatewayState(
                settings=settings,
                backends=backends,
                media=media,
                uploads=uploads,
                trials=trials,
                metrics=metrics,
                patience_is_over=patience_is_over,
                text_threads=text_threads,
            )
            await backends.start()
            stack.push_async_callback(cancel_all, [asyncio.create_task(uploads.run())])
            yield

    app = FastAPI(
        title="hippo",
        version=distribution_version(),
        summary="Video large language models, several times faster, losslessly.",
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would repeat the request's Host
        docs_url=None,  # FastAPI's pages load scripts of another site
        redoc_url=None,
        responses=ERRORS,
    )

    described = cache(partial(describe_api, app, asks_for_keys=not keyring.is_open))
    app.openapi = described  # type: ignore[method-assign]
    app.state.is_open = keyring.is_open
    install_error_handlers(app)
    for route in (chat, models, videos, tokenize, status, *([page] if settings.page else [])):
        app.include_router(route.router)
    # The last middleware added is the outermost: CORS preflight requests come without a key.
    app.add_middleware(KeyMiddleware, keyring=keyring)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
            max_age=600,
        )
    app.add_middleware(
        SiteMiddleware,
        allowed_hosts=settings.allowed_hosts or (() if keyring.is_open else ("*",)),
        origins=settings.cors_origins,
    )
    app.add_middleware(
        RequestMiddleware,
        max_body_bytes=settings.max_body_bytes,
        max_file_bytes=settings.max_media_bytes,
        budget=ByteBudget(settings.max_held_bytes),
        metrics=metrics,
    )
    return app
