"""Shares decoded frames among the services of one machine, through files in shared memory.

    hash of content, plan, limits and salt  ──►  one file: the pixels, JSON, the JSON's length

The first process whose decoder is free for an item takes the lock (flock) of its key, decodes, and
writes the file; the others wait for the lock and map the file. The kernel frees the lock of a
process that ends, and drops a file that was not finished. Linux only.
"""

import asyncio
import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import torch

from hippo.models.interface.base import DecodedMedia
from hippo.types import MediaKind

_BEAT_S = 0.1
_SILENCE_S = 1.0  # ten beats: a process that stops for so long is no longer waited for
_LENGTH_BYTES = 8


class SharedFrames:
    """A folder with the frames of at most ``max_bytes`` bytes; the files used last are kept.

    Only processes that may decode for each other may write to the folder. Raises OSError for a
    folder that cannot be made.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes

    async def decode(
        self,
        key: str,
        kind: MediaKind,
        decode: Callable[[int], Awaitable[DecodedMedia | None]],
        *,
        turn: Callable[[], AbstractAsyncContextManager[int]],
    ) -> DecodedMedia:
        """Returns the frames of ``key`` (hexadecimal), which ``decode`` makes if no process has
        made them, or if the folder is lost; raises what ``decode`` raises.

        ``decode`` runs in a ``turn`` of this process, whose number it gets, and after None in a
        further turn. The key is locked only then: no process waits for a process whose decoder is
        at work on something else.
        """
        if found := await asyncio.to_thread(self._read, key, kind):
            return found
        with self._lock_file(key) as lock:
            is_waited_for = True  # the process that has the lock
            while True:
                async with turn() as place:
                    if found := await asyncio.to_thread(self._read, key, kind):
                        return found
                    if lock is not None and _take(lock):
                        decoded = await _decode_beating(lock, lambda: decode(place))
                        if decoded is not None:
                            break
                        fcntl.flock(lock, fcntl.LOCK_UN)
                        continue
                    if lock is None or not is_waited_for:
                        if (decoded := await decode(place)) is not None:
                            return decoded
                        continue
                is_waited_for = await _wait_untaken(lock)
            await asyncio.to_thread(self._write, key, decoded)
        # One copy for all processes.
        return await asyncio.to_thread(self._read, key, kind) or decoded

    def clear(self) -> None:
        """Removes the files; frames that are in use stay until they are freed."""
        for path in self._folder.glob("*.*"):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _lock_file(self, name: str) -> Iterator[int | None]:
        """Opens the file of a lock, which is removed unless another process has the lock; None if
        the folder is lost. A process that is about to lock a removed file works without a lock."""
        path = self._folder / f"{name}.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield None
            return
        try:
            yield lock
        finally:
            if _take(lock):
                path.unlink(missing_ok=True)
            os.close(lock)

    def _read(self, key: str, kind: MediaKind) -> DecodedMedia | None:
        try:
            file = os.open(self._folder / f"{key}.frames", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            with contextlib.suppress(OSError):
                os.utime(file)
            end = os.fstat(file).st_size - _LENGTH_BYTES
            length = int.from_bytes(os.pread(file, _LENGTH_BYTES, end), "little")
            facts = json.loads(os.pread(file, length, end - length))
            path, size = f"/proc/self/fd/{file}", math.prod(facts["shape"])
            frames = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
        finally:
            os.close(file)
        return media_of(kind, facts, frames)

    def _write(self, key: str, decoded: DecodedMedia) -> None:
        """Writes a file if there is room for it; a process that finds no file decodes itself."""
        facts = {
            "shape": tuple(decoded.frames.shape),
            "seconds": decoded.frame_seconds,
            "sampled_fps": decoded.sampled_fps,
            "notes": decoded.notes,
        }
        text = json.dumps(facts).encode()
        end = text + len(text).to_bytes(_LENGTH_BYTES, "little")
        with contextlib.suppress(OSError), self._lock_file("space") as lock:
            is_mine = lock is not None and _take(lock)
            if not is_mine or not self._make_room(decoded.frames.nbytes + len(end)):
                return
            number = os.open(self._folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with open(number, "wb") as file:
                file.write(decoded.frames.contiguous().view(-1).numpy().data)
                file.write(end)
                file.flush()
                # Only with a dir_fd does os.link follow the symbolic link (linkat(2)).
                target = self._folder / f"{key}.frames"
                os.link(f"/proc/self/fd/{number}", target, src_dir_fd=number)

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes > self._max_bytes:
            return False
        files = [(path.stat(), path) for path in self._folder.glob("*.frames")]
        files.sort(key=lambda one: one[0].st_mtime_ns)
        total = num_bytes + sum(status.st_size for status, _ in files)
        while total > self._max_bytes:
            status, path = files.pop(0)
            path.unlink()
            total -= status.st_size
        return True


def media_of(kind: MediaKind, facts: Mapping[str, Any], memory: torch.Tensor) -> DecodedMedia:
    """Returns resized frames, whose pixels are ``memory`` (uint8 ``[size]``) in the shape that
    ``facts`` tell; these are as the worker replies them."""
    return DecodedMedia(
        kind,
        memory.view(facts["shape"]),
        tuple(facts["seconds"]),
        facts["sampled_fps"],
        is_resized=True,
        notes=tuple(facts["notes"]),
    )


def _take(lock: int) -> bool:
    """Takes the lock unless another process has it; returns whether it is taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _wait_untaken(lock: int) -> bool:
    """Waits until nobody has the lock; returns False if its holder has been silent for too long."""
    began_s = time.time()
    while not _take(lock):
        if time.time() - max(os.fstat(lock).st_mtime, began_s) > _SILENCE_S:
            return False
        await asyncio.sleep(_BEAT_S / 10)
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


async def _decode_beating(
    lock: int, decode: Callable[[], Awaitable[DecodedMedia | None]]
) -> DecodedMedia | None:
    """Decodes, and marks the lock file as long as this process runs."""

    async def beat() -> None:
        while True:
            os.utime(lock)
            await asyncio.sleep(_BEAT_S)

    beating = asyncio.create_task(beat())
    try:
        return await decode()
    finally:
        beating.cancel()
