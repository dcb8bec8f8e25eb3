"""A service from the first bound port to the last closed stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from hippo.engine.engine import Engine
from hippo.engine.host import Backend, HostState, ServiceHost
from hippo.engine.mailbox import settle
from hippo.engine.media_cache import Decoder
from hippo.engine.metrics import MetricsServer, start_metrics
from hippo.engine.prompts import PromptReader
from hippo.engine.settings import NO_REUSE, ReuseOptions
from hippo.engine.slots import SlotPool
from hippo.models.base import VideoLanguageModel
from hippo.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, TlsFiles
from hippo.rpc.server import RpcServer

_log = logging.getLogger(__name__)


def _accept(_: VideoLanguageModel) -> None:
    return None


class EngineService:
    """Assembles one service: ``start``, ``serve_model``, ``drain``, ``stop``, in this order.

    The caller registers its servicer, made with ``host``, with ``rpc.server`` before ``start``.
    ``max_waiting`` sequences may wait for a slot; ``media_cache_bytes`` of decoded media are kept.
    ``check_model`` raises ModelLoadError for a model that the settings do not fit.
    ``stop`` may be called at any point.
    """

    def __init__(
        self,
        service_name: str,
        *,
        max_waiting: int,
        reuse: ReuseOptions = NO_REUSE,
        check_model: Callable[[VideoLanguageModel], object] = _accept,
        media_cache_bytes: int = 0,
        tls: TlsFiles | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self.rpc = RpcServer(service_name, tls=tls, max_message_bytes=max_message_bytes)
        self.host: ServiceHost = ServiceHost()
        self._reuse = reuse
        self._check_model = check_model
        self._max_waiting = max_waiting
        self._media_cache_bytes = media_cache_bytes
        self.port: int | None = None  # while it listens
        self._metrics: MetricsServer | None = None
        self._failing: asyncio.Task[None] | None = None
        # Set, with the reason, when the device is of no use any more.
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def start(self, host: str, port: int, *, metrics_port: int | None = None) -> int:
        """Listens, answering NOT_SERVING; the bound port. UnavailableError when it is taken."""
        if metrics_port is not None:
            self._metrics = start_metrics(self.host.stats, host=host, port=metrics_port)
        self.port = await self.rpc.start(host, port)
        return self.port

    @property
    def metrics_port(self) -> int | None:
        """None: no metrics are served."""
        return None if self._metrics is None else self._metrics.port

    async def serve_model(self, model: VideoLanguageModel, decoder: Decoder) -> None:
        """Warms the model up and serves; ``decoder`` stays the caller's to close."""
        info = model.info
        self._check_model(model)
        engine = Engine(model, on_failure=self.fail, reuse=self._reuse)
        self.host.backend = Backend(
            info=info,
            engine=engine,
            slots=SlotPool(info.num_slots, max_waiting=self._max_waiting),
            prompts=PromptReader(model, decoder, media_cache_bytes=self._media_cache_bytes),
        )
        engine.start()
        await engine.warm_up()
        self.host.state = HostState.SERVING
        await self.rpc.set_serving(True)

    async def drain(self, seconds: float) -> None:
        """Refuses new streams and waits for running ones, at most ``seconds``."""
        self.host.state = HostState.DRAINING
        await self.rpc.set_serving(False)
        if not await self.host.wait_idle(seconds):
            _log.warning("sequences still ran after %g seconds of draining", seconds)

    def fail(self, error: Exception) -> None:
        """Serves no more and sets ``failed``: the device is of no use."""
        if self.host.state is HostState.SERVING:
            self.host.state = HostState.FAILED
        self._failing = asyncio.create_task(self.rpc.set_serving(False))
        settle(self.failed, error, None)

    async def stop(self) -> None:
        """Ends what runs, the server and the device thread."""
        self.host.state = HostState.DRAINING
        await self.rpc.stop()
        if self._failing is not None:
            await self._failing
        if self.host.backend is not None:
            await self.host.backend.engine.stop()
            self.host.backend.prompts.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
