"""Shares decoded frames among the services of one machine, through files in shared memory.

    hash of content, plan, limits and salt  ──►  one file: the pixels, JSON, the JSON's length

The first process that needs an item takes the lock (flock) of its key, decodes, and writes the
file; the others wait for the lock and map the file. The kernel frees the lock of a process that
ends, and drops a file that was not finished. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from hippo.models.base import DecodedMedia
from hippo.types import MediaKind

_NUM_LOCKS = 64  # files; keys that share one are decoded one after another
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
        for name in ("space", *map(str, range(_NUM_LOCKS))):
            (folder / f"{name}.lock").touch(mode=0o600)

    async def decode(
        self, key: str, kind: MediaKind, decode: Callable[[], Awaitable[DecodedMedia]]
    ) -> DecodedMedia:
        """Returns the frames of ``key`` (hexadecimal), which ``decode`` makes if no process has
        made them, or if the folder is lost; raises what ``decode`` raises."""
        try:
            lock = self._open_lock(str(int(key[:2], 16) % _NUM_LOCKS))
        except OSError:
            return await decode()
        with contextlib.closing(os.fdopen(lock, "r+b", buffering=0)):  # frees the lock
            is_locked = await _wait_locked(lock)
            if found := await asyncio.to_thread(self._read, key, kind):
                return found
            if not is_locked:
                return await decode()
            beating = asyncio.create_task(_beat(lock))
            try:
                decoded = await decode()
            finally:
                beating.cancel()
            await asyncio.to_thread(self._write, key, decoded)
        # One copy for all processes.
        return await asyncio.to_thread(self._read, key, kind) or decoded

    def clear(self) -> None:
        """Removes the files; frames that are in use stay until they are freed."""
        for path in self._folder.glob("*.frames"):
            path.unlink(missing_ok=True)

    def _open_lock(self, name: str) -> int:
        return os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

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
            frames = torch.from_file(
                f"/proc/self/fd/{file}",
                shared=False,
                size=math.prod(facts["shape"]),
                dtype=torch.uint8,
            )
        finally:
            os.close(file)
        return DecodedMedia(
            kind,
            frames.view(facts["shape"]),
            tuple(facts["seconds"]),
            facts["sampled_fps"],
            is_resized=True,
        )

    def _write(self, key: str, decoded: DecodedMedia) -> None:
        """Writes a file if there is room for it; a process without one decodes itself."""
        facts = {
            "shape": tuple(decoded.frames.shape),
            "seconds": decoded.frame_seconds,
            "sampled_fps": decoded.sampled_fps,
        }
        text = json.dumps(facts).encode()
        end = text + len(text).to_bytes(_LENGTH_BYTES, "little")
        with (
            contextlib.suppress(OSError),
            os.fdopen(self._open_lock("space"), "r+b", buffering=0) as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._make_room(decoded.frames.nbytes + len(end)):
                return
            number = os.open(self._folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with open(number, "wb", buffering=0) as file:
                for part in (decoded.frames.contiguous().view(-1).numpy().data, memoryview(end)):
                    while part:
                        part = part[file.write(part) :]
                # Only with a dir_fd does os.link follow the symbolic link (linkat(2)).
                target = self._folder / f"{key}.frames"
                os.link(f"/proc/self/fd/{number}", target, src_dir_fd=number)

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes > self._max_bytes:
            return False
        files = [(path, path.stat()) for path in self._folder.glob("*.frames")]
        files.sort(key=lambda one: one[1].st_mtime_ns)
        total = num_bytes + sum(status.st_size for _, status in files)
        for path, status in files:
            if total <= self._max_bytes:
                break
            path.unlink()
            total -= status.st_size
        return total <= self._max_bytes


async def _wait_locked(lock: int) -> bool:
    """Takes the lock; False if its holder has been silent for too long."""
    began_s = time.time()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.time() - max(os.fstat(lock).st_mtime, began_s) > _SILENCE_S:
                return False
        else:
            os.utime(lock)
            return True
        await asyncio.sleep(_BEAT_S / 10)


async def _beat(lock: int) -> None:
    """Marks the lock file as long as this process runs."""
    while True:
        os.utime(lock)
        await asyncio.sleep(_BEAT_S)
