"""Decodes untrusted media in a worker process with limited time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hippo.errors import ContextLengthError, MediaError, UnavailableError
from hippo.local_files import LocalFiles
from hippo.models.base import DecodedMedia
from hippo.types import FramePlan, Media
from hippo.video.limits import DecodeLimits
from hippo.video.resizing import FrameLimits
from hippo.video.sampling import resolve_plan
from hippo.video.shared import SharedFrames
from hippo.video.source import content_name, opened_media
from hippo.worker_process import Message, WorkerDiedError, WorkerProcess, map_whole

ResultT = TypeVar("ResultT")

_MOST_THREADS = 16  # of one video; FFmpeg's decoders gain little from more
_LARGE_BYTES = 4 << 20  # larger results are mapped, not copied
_CLOSED = "the media decoder is closed"
_NOT_STARTED = "the media decoder does not start: is hippo-serve[engine] installed whole?"


class MediaDecoder:
    """Decodes media in a worker process, one item after another; belongs to one event loop.

    ``start`` or the first ``decode`` starts the process, which is replaced if it crashes or exceeds
    a limit. ``files`` may be named by path. ``cpu_core`` pins the process to a core. The decoder
    must be closed.
    """

    def __init__(
        self,
        limits: DecodeLimits | None = None,
        *,
        files: LocalFiles | None = None,
        cpu_core: int | None = None,
        shared: SharedFrames | None = None,
    ) -> None:
        self.limits = limits or DecodeLimits()
        self.frame_limits = FrameLimits()  # the served model's, once it is loaded
        self._settings = json.dumps(
            {
                "limits": dataclasses.asdict(self.limits),
                "cpu_core": cpu_core,
                "num_threads": 1
                if cpu_core is not None
                else min(_MOST_THREADS, os.cpu_count() or 1),
            }
        )
        self._files = files or LocalFiles(())
        self._shared = shared
        self._turn = asyncio.Lock()
        self._worker: WorkerProcess | None = None
        self._working: asyncio.Future[Any] | None = None  # the thread that uses the worker
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None if no worker runs."""
        return None if self._worker is None else self._worker.process.pid

    async def start(self) -> None:
        """Starts the worker and waits until it is ready; raises UnavailableError if it fails."""
        async with self._turn:
            await self._start()

    async def decode(self, media: Media, plan: FramePlan, *, salt: str = "") -> DecodedMedia:
        """Returns the item's planned frames in the size that ``frame_limits`` and the plan give;
        their memory is freed with the tensor. ``shared`` frames are found under the same ``salt``.

        Raises MediaError for media that cannot be read or exceed a limit, MediaPathError for a path
        that cannot be opened, InvalidRequestError for a plan out of range, ContextLengthError if
        the plan has too little room, UnavailableError if the decoder is closed or its worker cannot
        start.
        """
        kind = media.kind.value
        resolved = resolve_plan(plan, self.limits, self.frame_limits, media.kind)
        request = {
            "kind": kind,
            "plan": dataclasses.asdict(resolved),
            "frame_limits": dataclasses.asdict(self.frame_limits),
        }
        if not media.path:
            self._check_data(media)
        if self._shared is None:
            async with self._turn:
                return await self._decode_item(media, request)
        facts = await content_name(media), request, dataclasses.astuple(self.limits), salt
        return await self._shared.decode(
            hashlib.sha256(repr(facts).encode()).hexdigest(),
            media.kind,
            lambda: self._decode_item(media, request),
            turn=self._turn,
        )

    async def _decode_item(self, media: Media, request: Message) -> DecodedMedia:
        """Decodes in the turn, which the caller has."""
        kind = media.kind.value

        def work(worker: WorkerProcess) -> DecodedMedia:
            with opened_media(media, self._files) as file:
                reply, result = worker.ask(request, file)
            if "is_out_of_memory" in reply:
                raise WorkerDiedError(reply["error"])
            if "is_too_long" in reply:
                raise ContextLengthError(reply["error"], param="messages")
            if "error" in reply:
                raise MediaError(reply["error"])
            return _decoded(media, reply, result)

        # A crash may have an external cause, and the previous item may have used up the memory:
        # both are retried once in a new process.
        with contextlib.suppress(WorkerDiedError):
            return await self._decode(work, kind)
        try:
            return await self._decode(work, kind)
        except WorkerDiedError as died:
            crash = f"the {kind} crashes its decoder; it is damaged: encode it again"
            raise MediaError(str(died) or crash) from None

    async def close(self) -> None:
        """Ends the worker, even while it decodes; running decodes raise UnavailableError. Shared
        frames are removed, because the other service may have ended or end as well."""
        self._is_closed = True
        self._retire()
        if self._shared is not None:
            self._shared.clear()
        async with self._turn:
            await asyncio.gather(*self._ending)

    async def __aenter__(self) -> MediaDecoder:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _check_data(self, media: Media) -> None:
        if media.uuid and not media.data:
            raise MediaError(
                f"no {media.kind.value} with the uuid {media.uuid!r} and these frames is kept; "
                "send the file with it"
            )
        self.limits.check_bytes(len(media.data), media.kind.value)

    async def _start(self) -> None:
        if self._worker is None:
            try:
                await self._with_worker(WorkerProcess.wait_ready)
            except WorkerDiedError:
                raise UnavailableError(_NOT_STARTED) from None

    async def _decode(
        self, work: Callable[[WorkerProcess], DecodedMedia], kind: str
    ) -> DecodedMedia:
        await self._start()
        try:
            return await self._with_worker(work, timeout_s=self.limits.timeout_s)
        except TimeoutError:
            raise MediaError(
                f"decoding the {kind} takes longer than the {self.limits.timeout_s:g} s allowed: "
                "ask for fewer frames, or send a shorter or smaller one"
            ) from None

    async def _with_worker(
        self, work: Callable[[WorkerProcess], ResultT], *, timeout_s: float | None = None
    ) -> ResultT:
        """Runs ``work`` on a thread; kills the worker after a timeout, cancellation or crash.

        Raises TimeoutError, WorkerDiedError, or UnavailableError if the decoder is closed.
        """
        if self._is_closed:
            raise UnavailableError(_CLOSED)
        worker = self._worker = self._worker or WorkerProcess("hippo.video.worker", self._settings)
        self._working = asyncio.ensure_future(asyncio.to_thread(work, worker))
        try:
            async with asyncio.timeout(timeout_s):
                result: ResultT = await asyncio.shield(self._working)
                return result
        except WorkerDiedError:
            self._retire()
            if self._is_closed:
                raise UnavailableError(_CLOSED) from None
            raise
        except (asyncio.CancelledError, TimeoutError):
            self._retire()
            raise
        finally:
            self._working = None  # its error refers to this frame

    def _retire(self) -> None:
        """Kills the worker, and cleans up when the thread that uses it has ended."""
        worker, self._worker, working = self._worker, None, self._working
        if worker is None:
            return
        worker.kill()

        async def end() -> None:
            if working is not None:
                await asyncio.gather(working, return_exceptions=True)
            await asyncio.to_thread(worker.clean_up)

        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _decoded(media: Media, reply: Message, result: int) -> DecodedMedia:
    shape = reply["shape"]
    if hasattr(fcntl, "F_ADD_SEALS"):  # so that the worker cannot shrink the file
        fcntl.fcntl(result, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        memory = _memory(result, math.prod(shape))
    finally:
        os.close(result)
    return DecodedMedia(
        kind=media.kind,
        frames=memory.view(shape),
        frame_seconds=tuple(reply["seconds"]),
        sampled_fps=reply["sampled_fps"],
        is_resized=True,
        notes=tuple(reply["notes"]),
    )


def _memory(result: int, size: int) -> torch.Tensor:
    """Returns a shared file's bytes as uint8 ``[size]``, without keeping a descriptor open; copies
    small files, so that they occupy no mapping."""
    path = f"/proc/self/fd/{result}"
    if size >= _LARGE_BYTES and os.path.exists(path):
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    with map_whole(result, size) as memory:
        return torch.frombuffer(bytearray(memory), dtype=torch.uint8)
