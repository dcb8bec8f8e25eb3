"""Decoding media in worker processes: untrusted bytes cannot stall, swamp or crash a service."""

from __future__ import annotations

import array
import asyncio
import dataclasses
import fcntl
import json
import os
import subprocess
from types import TracebackType
from typing import Any

import torch

from hippo.errors import HippoError, MediaError, UnavailableError
from hippo.models.base import DecodedMedia
from hippo.types import FramePlan, Media
from hippo.video.limits import DecodeLimits
from hippo.video.process import LARGE_BYTES, WorkerDiedError, WorkerProcess
from hippo.video.sampling import resolve_plan
from hippo.video.worker import SECONDS_ITEM_SIZE, map_whole

_NOT_STARTED = "the media decoder does not start: is hippo-serve[engine] installed whole?"


class MediaDecoder:
    """Decodes media in ``num_workers`` processes; belongs to one event loop.

    Processes are started once, by ``start`` or the first ``decode``, and replaced when one
    crashes or exceeds a limit. ``cpu_core`` pins them. Must be closed.
    """

    def __init__(
        self,
        limits: DecodeLimits | None = None,
        *,
        num_workers: int = 1,
        cpu_core: int | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; it must be at least 1")
        self.limits = limits or DecodeLimits()
        self._settings = json.dumps(
            {
                "limits": dataclasses.asdict(self.limits),
                "cpu_core": cpu_core,
                "num_threads": 1 if cpu_core is not None else min(4, os.cpu_count() or 1),
            }
        )
        self._num_workers = num_workers
        self._workers: set[WorkerProcess] = set()
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._reaping: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.process.pid for worker in self._workers]

    async def start(self) -> None:
        """Starts the workers and waits until they are ready; UnavailableError if they are not."""
        self._start_missing()
        try:
            await asyncio.gather(*(worker.wait_ready() for worker in self._workers))
        except WorkerDiedError:
            raise UnavailableError(_NOT_STARTED) from None

    async def decode(self, media: Media, plan: FramePlan) -> DecodedMedia:
        """The item's planned frames, in memory that is freed with the tensor.

        Raises MediaError for media that cannot be read or exceed a limit, InvalidRequestError for
        a plan out of range, UnavailableError when the decoder is closed or cannot run.
        """
        resolved = resolve_plan(plan, self.limits)
        if not media.data:
            raise MediaError(f"the {media.kind.value} is empty (0 bytes)")
        if len(media.data) > self.limits.max_bytes:
            raise MediaError(
                f"the {media.kind.value} has {len(media.data):,} bytes; at most "
                f"{self.limits.max_bytes:,} are allowed: send a shorter or smaller one"
            )
        request = {"kind": media.kind.value, "plan": dataclasses.asdict(resolved)}
        self._start_missing()
        worker = await self._idle.get()
        try:
            # A crash may have come from outside, and memory may have been short because of the
            # item before: both get one more chance, in a fresh process.
            for is_last in (False, True):
                reply, result = await self._ask(worker, request, media.data)
                if "shape" in reply:
                    if os.fstat(result).st_size < LARGE_BYTES:
                        return _decoded(media, reply, result)
                    return await asyncio.to_thread(_decoded, media, reply, result)
                if "error" in reply:
                    raise MediaError(reply["error"])
                worker = self._replace(worker)
                if is_last:
                    raise _failure(media, reply, self.limits)
            raise AssertionError("unreachable")
        except (asyncio.CancelledError, TimeoutError) as error:
            worker = self._replace(worker)
            if isinstance(error, TimeoutError):
                raise MediaError(
                    f"decoding the {media.kind.value} takes longer than the "
                    f"{self.limits.timeout_s:g} s allowed: send a shorter or smaller one"
                ) from None
            raise
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """Ends all workers, also those at work; decodes in flight raise UnavailableError."""
        self._is_closed = True
        for worker in list(self._workers):
            self._retire(worker)
        await asyncio.gather(*self._reaping)

    async def __aenter__(self) -> MediaDecoder:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _ask(
        self, worker: WorkerProcess, request: dict[str, Any], data: bytes
    ) -> tuple[dict[str, Any], int]:
        """The worker's reply and its result's descriptor; if it died, whether at its start."""
        try:
            await worker.wait_ready()
            async with asyncio.timeout(self.limits.timeout_s):
                return await worker.ask(request, data)
        except WorkerDiedError as died:
            if self._is_closed:
                raise UnavailableError("the media decoder is closed") from None
            return {"is_not_started": not died.was_ready}, -1

    def _start_missing(self) -> None:
        if self._is_closed:
            raise UnavailableError("the media decoder is closed")
        while len(self._workers) < self._num_workers:
            worker = WorkerProcess(self._settings)
            self._workers.add(worker)
            self._idle.put_nowait(worker)

    def _replace(self, worker: WorkerProcess) -> WorkerProcess:
        """Kills the worker; a new one in its place, unless the decoder is closed."""
        self._retire(worker)
        if self._is_closed:
            return worker
        fresh = WorkerProcess(self._settings)
        self._workers.add(fresh)
        return fresh

    def _retire(self, worker: WorkerProcess) -> None:
        if worker not in self._workers:
            return
        self._workers.discard(worker)
        worker.kill()
        task = asyncio.create_task(asyncio.to_thread(_wait, worker.process))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)


def _wait(process: subprocess.Popen[bytes]) -> None:
    process.wait()


def _decoded(media: Media, reply: dict[str, Any], result: int) -> DecodedMedia:
    num_frames, height, width, channels = reply["shape"]
    start = num_frames * SECONDS_ITEM_SIZE
    if hasattr(fcntl, "F_ADD_SEALS"):  # the worker cannot take the memory away any more
        fcntl.fcntl(result, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        memory = _memory(result, start + num_frames * height * width * channels)
    finally:
        os.close(result)
    return DecodedMedia(
        kind=media.kind,
        frames=memory[start:].view(num_frames, height, width, channels),
        frame_seconds=tuple(array.array("d", memory[:start].numpy().tobytes())),
        sampled_fps=reply["sampled_fps"],
    )


def _memory(result: int, size: int) -> torch.Tensor:
    """A shared file's bytes. They may be kept for long, so no descriptor stays open for them, and
    small results are copied, so that they need no mapping of their own."""
    path = f"/proc/self/fd/{result}"
    if size >= LARGE_BYTES and os.path.exists(path):
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    with map_whole(result, size) as memory:
        return torch.frombuffer(bytearray(memory), dtype=torch.uint8)


def _failure(media: Media, reply: dict[str, Any], limits: DecodeLimits) -> HippoError:
    if reply.get("is_not_started"):
        return UnavailableError(_NOT_STARTED)
    if reply.get("is_out_of_memory"):
        return MediaError(
            f"decoding the {media.kind.value} needs more than the "
            f"{limits.max_memory_bytes // 2**20:,} MiB of memory allowed: send a smaller one"
        )
    return MediaError(f"the {media.kind.value} crashes its decoder; it is damaged: encode it again")
