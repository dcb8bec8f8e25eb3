"""Compiles a model's layers while it serves with ordinary ones.

    service                                hippo.models.compile_apart, at a low priority
    start, with the layer's description ─►
    serves through ordinary layers         compiles, keeps the package in a folder
    loads the package              ◄────── ends
    device thread, between forwards: holds it against the ordinary layers, then uses it

Whatever fails of this, the service goes on with ordinary layers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from hippo.models.compiled import CHECKED_ROWS, CompiledSteps, log_failure
from hippo.models.compiled_layer import Run, load_layer
from hippo.subprocesses import importing_environment

_log = logging.getLogger(__name__)

OnDevice = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Engine.call."""


async def compile_beside(steps: CompiledSteps, on_device: OnDevice) -> None:
    """Has the steps' code made, loaded, checked and used; without it they stay ordinary ones.

    To be cancelled when the service ends.
    """
    began = time.monotonic()
    _log.info("compiling a layer beside the steps, once; %s keeps it", steps.folder)
    try:
        await _compile_apart(steps)
        run_layer = await asyncio.to_thread(_load, steps)
        differences = [
            await on_device(partial(steps.difference, run_layer, num_rows))
            for num_rows in CHECKED_ROWS
        ]
    except Exception as error:  # all works without it
        log_failure(error, logging.INFO)
        return
    if steps.are_small(differences):
        await on_device(partial(steps.use, run_layer))
        _log.info("steps of one sequence are compiled now, after %.0f s", time.monotonic() - began)


def _load(steps: CompiledSteps) -> Run:
    return load_layer(steps.folder / steps.spec.name())


async def _compile_apart(steps: CompiledSteps) -> None:
    """Raises RuntimeError with what the process says of its failure."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "hippo.models.compile_apart"),
        *(str(steps.folder), steps.spec.to_json()),
        stdin=asyncio.subprocess.PIPE,  # ends with this process, and the child with that
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=importing_environment(),
    )
    assert process.stderr is not None
    try:
        said = await process.stderr.read()
        code = await process.wait()
    finally:
        if process.returncode is None:
            for kill in (partial(os.killpg, process.pid, signal.SIGKILL), process.kill):
                with contextlib.suppress(ProcessLookupError):  # it has no group yet, or has ended
                    kill()
            await process.wait()
    if code != 0:
        text = said.decode("utf-8", "replace").strip()
        _log.debug("the compiling process: %s", text)
        if code < 0:
            raise RuntimeError(f"the process was ended by {signal.Signals(-code).name}")
        raise RuntimeError(text.splitlines()[-1] if text else f"the process ended ({code})")
