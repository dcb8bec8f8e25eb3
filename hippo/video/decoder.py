"""Decodes untrusted media in worker processes with limited time and memory."""

import dataclasses
import fcntl
import hashlib
import math
import os
from contextlib import AbstractAsyncContextManager

import torch

from hippo.base.local_files import LocalFiles
from hippo.base.worker_process import ForkedWorker, ForkServer, Message, WorkerDiedError, map_whole
from hippo.errors import ContextLengthError, MediaError
from hippo.media.limits import NUM_WORKERS, DecodeLimits
from hippo.media.resizing import FrameLimits
from hippo.media.sampling import resolve_plan
from hippo.models.interface.base import DecodedMedia
from hippo.types import FramePlan, Media
from hippo.video.seats import Seat, Turns
from hippo.video.shared import SharedFrames, media_of
from hippo.video.source import content_name, opened_media

_MOST_THREADS = 16  # for a video; FFmpeg's decoders gain little from more
_LARGE_BYTES = 4 << 20  # larger results are mapped, not copied
CHEAP_S = 1.0
"""Estimated seconds of a cheap item: any image up to the default --max-frame-pixels, and a clip of
10 s in 1080p, cost 0.4 and 0.7; a film costs 10 and more."""

_CHEAP_TIMEOUT_S = 10 * CHEAP_S
"""An item that takes longer is not cheap after all: some codecs take ten times as long as the
fastest."""


class MediaDecoder:
    """Decodes media in ``num_workers`` worker processes, each one item after another; belongs to
    one event loop.

    The last of several workers decodes only cheap items, which so wait for no long item. ``start``
    or the first item starts the process that workers are forked from, and the first worker. A
    worker is replaced if it crashes or exceeds a limit. ``files`` may be named by path.
    ``cpu_core`` pins the processes to a core. The decoder must be closed.
    """

    def __init__(
        self,
        limits: DecodeLimits | None = None,
        *,
        num_workers: int = NUM_WORKERS,
        files: LocalFiles | None = None,
        cpu_core: int | None = None,
        shared: SharedFrames | None = None,
    ) -> None:
        self.limits = limits or DecodeLimits()
        self.frame_limits = FrameLimits()  # the served model's, once it is loaded
        num_threads = 1 if cpu_core is not None else min(_MOST_THREADS, os.cpu_count() or 1)
        settings = {"limits": dataclasses.asdict(self.limits), "cpu_core": cpu_core}
        settings["num_threads"] = num_threads
        self._files = files or LocalFiles(())
        self._shared = shared
        self._turns = Turns(num_workers)
        self._server = ForkServer("hippo.video.worker", settings)
        self._seats = [Seat(self._server) for _ in range(num_workers)]

    @property
    def worker_pids(self) -> list[int | None]:
        """Process ids of the workers; None for one that does not run."""
        return [seat.worker_pid for seat in self._seats]

    async def start(self) -> None:
        """Starts a worker and waits until it is ready; raises UnavailableError if it fails."""
        async with self._turns.turn("") as seat:
            await self._seats[seat].start()

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        """Returns the item's planned frames in the size that ``frame_limits`` and the plan give;
        their memory is freed with the tensor. ``shared`` frames are found under the same ``salt``.
        While others wait, one item of a ``client`` is decoded at a time.

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
        if media.uuid and not (media.path or media.data):
            raise MediaError(
                f"no {kind} with the uuid {media.uuid!r} and these frames is kept; send the file "
                "with it"
            )
        if not media.path:
            self.limits.check_bytes(len(media.data), kind)
        is_expensive = False

        def turn() -> AbstractAsyncContextManager[int]:
            return self._turns.turn(client, is_expensive=is_expensive)

        async def decode(seat: int) -> DecodedMedia | None:
            nonlocal is_expensive
            decoded = await self._decode_on(seat, media, request)
            is_expensive = decoded is None
            return decoded

        if self._shared is None:
            while True:
                async with turn() as seat:
                    if (decoded := await decode(seat)) is not None:
                        return decoded
        facts = await content_name(media), request, dataclasses.astuple(self.limits), salt
        name = hashlib.sha256(repr(facts).encode()).hexdigest()
        return await self._shared.decode(name, media.kind, decode, turn=turn)

    async def close(self) -> None:
        """Ends the workers, even while they decode; running decodes raise UnavailableError. Shared
        frames are removed, because the other service may have ended or end as well."""
        for seat in self._seats:
            seat.close()
        if self._shared is not None:
            self._shared.clear()
        for seat in self._seats:
            await seat.wait_ended()
        self._server.close()

    async def __aenter__(self) -> "MediaDecoder":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _decode_on(self, seat: int, media: Media, request: Message) -> DecodedMedia | None:
        """Returns the item's frames, or None if it is too expensive for the seat."""
        kind, is_cheap_only = media.kind.value, self._turns.is_reserved(seat)
        asked = {**request, "max_cost_s": CHEAP_S if is_cheap_only else None}

        def work(worker: ForkedWorker) -> DecodedMedia | None:
            with opened_media(media, self._files) as file:
                reply, result = worker.ask(asked, file)
            if "is_expensive" in reply:
                return None
            if "is_out_of_memory" in reply:
                raise WorkerDiedError(reply["error"])
            if "is_too_long" in reply:
                raise ContextLengthError(reply["error"], param="messages")
            if "error" in reply:
                raise MediaError(reply["error"])
            return _decoded(media, reply, result)

        timeout_s = self.limits.timeout_s
        if is_cheap_only:
            timeout_s = min(timeout_s, _CHEAP_TIMEOUT_S)
        reason = ""
        # Twice: a crash may have an external cause, or the item before has used up the memory.
        for _ in range(2):
            try:
                return await self._seats[seat].run(work, timeout_s=timeout_s)
            except WorkerDiedError as died:
                reason = (
                    str(died) or f"the {kind} crashes its decoder; it is damaged: encode it again"
                )
            except TimeoutError:
                if timeout_s < self.limits.timeout_s:
                    return None
                raise MediaError(
                    f"decoding the {kind} takes longer than the {self.limits.timeout_s:g} s "
                    "allowed: ask for fewer frames, or send a shorter or smaller one"
                ) from None
        raise MediaError(reason)


def _decoded(media: Media, reply: Message, result: int) -> DecodedMedia:
    """Returns the frames in a shared file without keeping a descriptor open; copies small files, so
    that they occupy no mapping."""
    size, path = math.prod(reply["shape"]), f"/proc/self/fd/{result}"
    if hasattr(fcntl, "F_ADD_SEALS"):  # so that the worker cannot shrink the file
        fcntl.fcntl(result, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        if size >= _LARGE_BYTES and os.path.exists(path):
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        else:
            with map_whole(result, size) as mapped:
                memory = torch.frombuffer(bytearray(mapped), dtype=torch.uint8)
    finally:
        os.close(result)
    return media_of(media.kind, reply, memory)
