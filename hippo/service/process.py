"""The process of a service: CPU affinity, logs, model, signals, exit code."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Protocol, TypeVar

import uvloop

from hippo.base.heap import trim_heap
from hippo.base.local_files import LocalFiles
from hippo.base.logs import setup_logging
from hippo.base.tasks import cancel_all
from hippo.base.tracing import start_tracing, stop_tracing
from hippo.engine.cpu import prepare_cpu
from hippo.engine.device_thread import run_into
from hippo.errors import HippoError, UnavailableError
from hippo.models.interface.base import VideoLanguageModel
from hippo.models.interface.checkpoint import Progress
from hippo.models.load import load_model
from hippo.service.service import EngineService
from hippo.service.settings import EngineSettings
from hippo.video.decoder import MediaDecoder

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class ModelSource(Protocol):
    """Loads the model, in this process or in several processes."""

    @property
    def lost(self) -> Future[HippoError]:
        """Set to the reason when the model cannot be used any more: by the source, or by
        ``serve`` after a failure of the device."""

    def load(self, progress: Progress) -> VideoLanguageModel:
        """Returns the model; any thread may call it. Raises HippoError."""

    def close(self) -> None:
        """Ends the model's other processes, and waits for their end."""


def run_process(
    name: str,
    build: Callable[[], EngineService],
    settings: EngineSettings,
    port: int,
    source: ModelSource | None = None,
) -> int:
    """Prepares the process and runs the service; returns the exit code.

    Without a ``source``, the model is loaded into this process by ``settings.load_plan``.
    """
    setup_logging(name, level=settings.log_level, style=settings.log_style)
    source = source or LocalSource(settings)
    code = 1
    try:
        prepare_cpu(settings.load_plan.core_of(0), settings.num_threads)
        start_tracing(name)
        uvloop.run(serve(build, settings, port, source))
        code = 0
    except HippoError as error:
        _log.error("%s", error.message)
    except Exception:
        _log.exception("the service failed")
    finally:
        stop_tracing()
        if source.lost.done() or any(t.name == _LOADER for t in threading.enumerate()):
            # The loading thread, or a thread that waits for a lost process or device, cannot be
            # interrupted otherwise.
            logging.shutdown()
            os._exit(code)
    return code


async def serve(
    build: Callable[[], EngineService], settings: EngineSettings, port: int, source: ModelSource
) -> None:
    """Starts the service, loads the model, serves until SIGTERM or SIGINT, drains and stops.

    Raises HippoError if the model cannot be loaded or is lost, or if its device fails.
    """
    service = build()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    decoder = MediaDecoder(
        settings.decode_limits(),
        num_workers=settings.decode_workers,
        files=LocalFiles(settings.allowed_local_media_path),
        cpu_core=settings.load_plan.core_of(0),
        shared=settings.shared_frames(),
    )
    try:
        bound = await service.start(settings.host, port, metrics_port=settings.metrics_port)
        if settings.port_file:
            _write_port(Path(settings.port_file), bound)
        _log.info("listening on %s:%d", settings.host, bound)
        serving = asyncio.create_task(_load_and_serve(service, settings, source, decoder))
        waiting = asyncio.create_task(stopping.wait())
        losing = asyncio.create_task(_wait_lost(service, source))
        await asyncio.wait((serving, waiting, losing), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises an error of loading
            await asyncio.wait((waiting, losing), return_when=asyncio.FIRST_COMPLETED)
        if losing.done():
            service.fail(losing.result())
            raise losing.result()
        if serving.done():
            _log.info("draining for at most %g seconds", settings.drain_seconds)
            await service.drain(settings.drain_seconds)
        await cancel_all([serving, waiting, losing])
    finally:
        await _stop(service, source)
        await decoder.close()
    _log.info("stopped")


async def _wait_lost(service: EngineService, source: ModelSource) -> HippoError:
    """Returns the reason when the model is lost. If the device failed, first waits for the streams
    to end, so that clients receive that error instead of a broken connection."""
    lost = asyncio.wrap_future(source.lost)
    await asyncio.wait((lost, service.failed), return_when=asyncio.FIRST_COMPLETED)
    if service.failed.done():
        await service.wait_idle(_ANSWER_SECONDS)
        reason = str(service.failed.result()).partition("\n")[0]
        with contextlib.suppress(InvalidStateError):  # the source has set a reason
            source.lost.set_result(UnavailableError(f"the device failed: {reason}"))
    return source.lost.result()


async def _stop(service: EngineService, source: ModelSource) -> None:
    """Stops the service, then the model's other processes."""
    stopping = asyncio.ensure_future(service.stop())
    # If the model is lost, the device thread may wait for it forever.
    seconds = _LOST_STOP_SECONDS if source.lost.done() else None
    await asyncio.wait((stopping,), timeout=seconds)
    if stopping.done():
        stopping.result()
    await asyncio.to_thread(source.close)


async def _load_and_serve(
    service: EngineService, settings: EngineSettings, source: ModelSource, decoder: MediaDecoder
) -> VideoLanguageModel:
    await decoder.start()
    model = await _in_daemon_thread(lambda: _load(source))
    decoder.frame_limits = settings.frame_limits(model.frame_limits)
    _log.info("warming up")
    await service.serve_model(model, decoder)
    # Without freezing, a full garbage collection scans the loaded objects: 0.2 s in a step.
    gc.collect()
    gc.freeze()
    trim_heap()  # loading and warming up have left hundreds of megabytes there
    info = model.info
    _log.info(
        "serving %s: %.1f M parameters, %s on %s, %d slots of %d tokens",
        info.name,
        info.num_parameters / 1e6,
        info.dtype,
        info.device,
        info.num_slots,
        info.max_context_length,
    )
    return model


class LocalSource:
    """Loads the model into this process only."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.lost: Future[HippoError] = Future()

    def load(self, progress: Progress) -> VideoLanguageModel:
        return load_model(self._settings.load_plan, progress=progress)

    def close(self) -> None:
        pass


def _load(source: ModelSource) -> VideoLanguageModel:
    shown: tuple[str, int] | None = None

    def show_progress(stage: str, share: float) -> None:
        nonlocal shown
        tenth = int(share * 10)
        if shown != (stage, tenth):
            shown = (stage, tenth)
            _log.info("%s: %d %%", stage, tenth * 10)

    return source.load(show_progress)


_LOADER = "load-model"
_LOST_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 2.0  # for sending a device failure to clients


async def _in_daemon_thread(function: Callable[[], ResultT]) -> ResultT:
    """Works as asyncio.to_thread, but the process can end while the thread still runs."""
    done: Future[ResultT] = Future()
    threading.Thread(target=run_into, args=(done, function), name=_LOADER, daemon=True).start()
    return await asyncio.wrap_future(done)


def _write_port(path: Path, port: int) -> None:
    """Writes the file in one step, because another process may read it as soon as it exists."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(f"{port}\n")
    partial.replace(path)
