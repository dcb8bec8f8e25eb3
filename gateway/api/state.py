"""The objects that all routes share, as a FastAPI dependency."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from gateway.common.config import GatewaySettings
from gateway.common.metrics import GatewayMetrics
from gateway.media.reader import MediaReader
from gateway.media.uploads import Uploads
from gateway.pairs.backends import Backends
from hippo.grammars.trials import GrammarTrials


@dataclass(frozen=True, slots=True)
class GatewayState:
    """The shared objects of one application."""

    settings: GatewaySettings
    backends: Backends
    media: MediaReader
    uploads: Uploads
    trials: GrammarTrials
    metrics: GatewayMetrics
    text_threads: ThreadPoolExecutor  # that tokenize
    patience_is_over: asyncio.Event  # set when the server stops waiting for running answers


def _state(request: Request) -> GatewayState:
    state = request.app.state.gateway
    assert isinstance(state, GatewayState)
    return state


State = Annotated[GatewayState, Depends(_state)]
