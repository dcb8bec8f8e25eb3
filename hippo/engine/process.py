"""The process around a service: core, logs, model, signals, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from hippo.engine.service import AnyService
from hippo.engine.settings import EngineSettings
from hippo.errors import HippoError
from hippo.logs import setup_logging
from hippo.models.base import VideoLanguageModel
from hippo.models.loading import load_model
from hippo.video.decoder import MediaDecoder

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


def run_process(
    name: str, build: Callable[[], AnyService], settings: EngineSettings, port: int
) -> int:
    """Prepares the process and runs the service in it; the exit code."""
    setup_logging(name, level=settings.log_level, style=settings.log_style)
    try:
        _prepare_cpu(settings)
        asyncio.run(serve(build, settings, port))
    except HippoError as error:
        _log.error("%s", error.message)
        return 1
    finally:
        if any(thread.name == _LOADER for thread in threading.enumerate()):
            logging.shutdown()  # a model still loads: nothing can interrupt it but the end
            os._exit(0)
    return 0


async def serve(build: Callable[[], AnyService], settings: EngineSettings, port: int) -> None:
    """Builds, starts, loads the model, serves until SIGTERM or SIGINT, drains and stops."""
    service = build()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    decoder = MediaDecoder(settings.decode_limits(), cpu_core=settings.cpu_core)
    try:
        bound = await service.start(settings.host, port, metrics_port=settings.metrics_port)
        if settings.port_file:
            _write_port(Path(settings.port_file), bound)
        _log.info("listening on %s:%d", settings.host, bound)
        serving = asyncio.create_task(_load_and_serve(service, settings, decoder))
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            await waiting
            _log.info("draining for at most %g seconds", settings.drain_seconds)
            await service.drain(settings.drain_seconds)
        for task in (serving, waiting):
            task.cancel()
        await asyncio.gather(serving, waiting, return_exceptions=True)
    finally:
        await service.stop()
        await decoder.close()
    _log.info("stopped")


async def _load_and_serve(
    service: AnyService, settings: EngineSettings, decoder: MediaDecoder
) -> None:
    await decoder.start()
    model = await _in_daemon_thread(lambda: _load(settings))
    _log.info("warming up")
    await service.serve_model(model, decoder)
    # What is loaded stays: a full garbage collection over it would hold up a step for 0.2 s.
    gc.collect()
    gc.freeze()
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


def _load(settings: EngineSettings) -> VideoLanguageModel:
    shown: tuple[str, int] | None = None

    def show_progress(stage: str, share: float) -> None:
        nonlocal shown
        tenth = int(share * 10)
        if shown != (stage, tenth):
            shown = (stage, tenth)
            _log.info("%s: %d %%", stage, tenth * 10)

    return load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        num_slots=settings.slots,
        max_context_length=settings.max_context_length,
        served_name=settings.served_name,
        progress=show_progress,
    )


_LOADER = "load-model"


async def _in_daemon_thread(function: Callable[[], ResultT]) -> ResultT:
    """As asyncio.to_thread, but the process can end while the thread still runs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def settle(result: ResultT | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=_LOADER, daemon=True).start()
    return await future


def _prepare_cpu(settings: EngineSettings) -> None:
    """Pins every thread there is, and so all that come, and sizes torch's thread pool."""
    if settings.cpu_core is not None:
        try:
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(thread.name), {settings.cpu_core})
        except OSError:
            cores = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise HippoError(
                f"--cpu-core {settings.cpu_core}: this process may run on cores {cores}"
            ) from None
        torch.set_num_threads(1)
    elif settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)


def _write_port(path: Path, port: int) -> None:
    """Whole or not at all: whoever waits for the file may read it at once."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(f"{port}\n")
    partial.replace(path)
