"""The life of a service, from binding its port to closing its last stream."""

import asyncio
import enum
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from hippo.base.local_files import LocalFiles
from hippo.base.texts import text_limit
from hippo.catalog.sizes import cache_limit
from hippo.engine.engine import Engine
from hippo.engine.grammars import grammar_compiler
from hippo.engine.media_cache import Decoder
from hippo.engine.prompts import NUM_READER_THREADS, PromptReader
from hippo.engine.slots import SlotPool
from hippo.errors import UnavailableError
from hippo.models.interface.base import VideoLanguageModel
from hippo.rpc.server import RpcServer
from hippo.service.backend import Backend
from hippo.service.metrics import MetricsServer, start_metrics
from hippo.service.settings import QUEUED_MESSAGES, EngineSettings
from hippo.types import ModelInfo

_log = logging.getLogger(__name__)


class ServiceState(enum.Enum):
    """The state of a service; the value is the reason for refusing a stream (except SERVING)."""

    LOADING = "the service is still loading its model"
    SERVING = "serving"
    DRAINING = "the service is shutting down"
    FAILED = "the service's device has failed"


class EngineService:
    """One service: call ``start``, ``serve_model``, ``drain`` and ``stop``, in this order.

    The caller registers its servicer with ``rpc.server`` before ``start``. At most ``max_waiting``
    sequences wait for a slot. ``num_tapped`` says how many of a model's layers score visual tokens,
    and raises ModelLoadError for a model that does not fit the settings. ``stop`` may be called at
    any time. Only for the event loop.
    """

    def __init__(
        self,
        service_name: str,
        settings: EngineSettings,
        *,
        max_waiting: int,
        num_tapped: Callable[[VideoLanguageModel], int] = lambda model: 0,
    ) -> None:
        self.rpc = RpcServer(
            service_name,
            tls=settings.tls,
            max_message_bytes=settings.max_message_bytes,
            has_reflection=settings.reflection,
        )
        self._settings = settings
        self._num_tapped = num_tapped
        self._max_waiting = max_waiting
        self._state = ServiceState.LOADING
        self.backend: Backend | None = None  # once the model is loaded
        self.num_streams = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.port: int | None = None  # None before ``start``
        self._metrics: MetricsServer | None = None
        self._failing: asyncio.Task[None] | None = None
        # Set to the reason when the device has failed.
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @property
    def info(self) -> ModelInfo:
        """Describes the model; raises UnavailableError until the model is loaded."""
        if self.backend is None:
            raise UnavailableError(self._state.value)
        return self.backend.info

    @property
    def metrics_port(self) -> int | None:
        """The port of /metrics; None if metrics are not served."""
        return None if self._metrics is None else self._metrics.port

    @contextmanager
    def stream(self) -> Iterator[Backend]:
        """Counts one stream; raises UnavailableError unless the service is SERVING."""
        if self._state is not ServiceState.SERVING or self.backend is None:
            raise UnavailableError(self._state.value)
        self.num_streams += 1
        self._is_idle.clear()
        try:
            yield self.backend
        finally:
            self.num_streams -= 1
            if self.num_streams == 0:
                self._is_idle.set()

    async def start(self, host: str, port: int, *, metrics_port: int | None = None) -> int:
        """Listens with health NOT_SERVING; returns the port. Raises UnavailableError if taken."""
        if metrics_port is not None:
            self._metrics = start_metrics(self, host=host, port=metrics_port)
        self.port = await self.rpc.start(host, port)
        return self.port

    async def serve_model(self, model: VideoLanguageModel, decoder: Decoder) -> None:
        """Warms the model up and serves it; the caller closes ``decoder``."""
        settings = self._settings
        files = LocalFiles(settings.allowed_local_media_path)
        compiler = await asyncio.to_thread(grammar_compiler, model.info)
        limit = await asyncio.to_thread(text_limit, model.info)
        info = replace(
            model.info,
            media_dirs=tuple(map(str, files.directories)),
            takes_grammars=compiler is not None,
            frame_sampling=json.dumps(
                {
                    "max_frames": settings.max_frames,
                    "limits": asdict(settings.frame_limits(model.frame_limits)),
                }
            ),
        )
        num_tapped = self._num_tapped(model)
        engine = Engine(
            model,
            on_failure=self.fail,
            vision_cache_bytes=cache_limit(settings.vision_cache_bytes, model.feature_bytes),
            keeps_prefixes=settings.keeps_prefixes,
        )
        self.backend = Backend(
            info=info,
            engine=engine,
            slots=SlotPool(
                info.num_slots,
                max_waiting=self._max_waiting,
                max_waiting_bytes=QUEUED_MESSAGES * settings.max_message_bytes,
                num_near=NUM_READER_THREADS,
            ),
            prompts=PromptReader(
                model,
                decoder,
                media_cache_bytes=cache_limit(settings.media_cache_bytes, model.frame_bytes),
                max_decoded_bytes=settings.decode_limits().max_memory_bytes,
                compiler=compiler,
                text_limit=limit,
            ),
            files=files,
        )
        engine.start()
        await engine.warm_up(num_tapped)
        self._state = ServiceState.SERVING
        await self.rpc.set_serving(True)

    async def drain(self, seconds: float) -> None:
        """Refuses new streams and waits for running ones, at most ``seconds``."""
        self._state = ServiceState.DRAINING
        await self.rpc.set_serving(False)
        if not await self.wait_idle(seconds):
            _log.warning("sequences still ran after %g seconds of draining", seconds)

    async def wait_idle(self, timeout: float) -> bool:
        """Waits for the last stream to end; returns False after ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def fail(self, error: Exception) -> None:
        """Stops serving and sets ``failed``, because the device has failed."""
        if self._state is ServiceState.SERVING:
            self._state = ServiceState.FAILED
        self._failing = asyncio.create_task(self.rpc.set_serving(False))
        if not self.failed.done():
            self.failed.set_result(error)

    async def stop(self) -> None:
        """Ends running streams, the server and the device thread."""
        self._state = ServiceState.DRAINING
        await self.rpc.stop()
        if self._failing is not None:
            await self._failing
        if self.backend is not None:
            await self.backend.engine.stop()
            self.backend.prompts.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
