"""The worker process: decodes one item after the other until its parent goes away.

    parent -> worker   one line of JSON and the descriptor of a file with the media
    worker -> parent   one line of JSON and, on success, the descriptor of a file with the result:
                       num_frames float64 times, then num_frames * height * width * 3 bytes (RGB)

Both files are anonymous memory that the two processes share: pixels are written once, and nothing
is left behind whichever of the two dies. The process imports neither torch nor a model.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
from typing import Any

SECONDS_ITEM_SIZE = 8


def shared_file(size: int) -> int:
    """A descriptor of ``size`` zero bytes in memory, without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hippo-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_whole(descriptor: int, size: int) -> mmap.mmap:
    """Maps a shared file for both sides to read and write, its pages all at once."""
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def receive_line(channel: socket.socket, pending: bytearray, fds: list[int]) -> bool:
    """Reads what has come into ``pending`` and ``fds``; False at the end of the channel."""
    data, new, _, _ = socket.recv_fds(channel, 65536, 4)
    fds += new
    pending += data
    return bool(data)


class Result:
    """The shared file of one result, mapped while it is filled."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._map: mmap.mmap | None = None

    def allocate(self, num_frames: int, height: int, width: int) -> Any:
        """The pixels' place as an array uint8 ``[num_frames, height, width, 3]``."""
        import numpy as np

        start = num_frames * SECONDS_ITEM_SIZE
        size = start + num_frames * height * width * 3
        self.descriptor = shared_file(size)
        self._map = map_whole(self.descriptor, size)
        pixels = np.frombuffer(self._map, dtype=np.uint8, offset=start)
        return pixels.reshape(num_frames, height, width, 3)

    def put_seconds(self, seconds: tuple[float, ...]) -> None:
        """Writes the times in front of the pixels."""
        assert self._map is not None
        data = array.array("d", seconds).tobytes()
        self._map[: len(data)] = data

    def close(self) -> None:
        """Gives the memory back; the pixels must not be used any more."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # still seen by an array on its way out
                self._map.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)


def decode(
    request: dict[str, Any], media: int, settings: dict[str, Any], result: Result
) -> dict[str, Any]:
    """Decodes the item in the file ``media`` into ``result``; the reply's fields."""
    from hippo.video.frame_list import MAGIC
    from hippo.video.frames import read_video
    from hippo.video.images import read_frames, read_image
    from hippo.video.limits import DecodeLimits
    from hippo.video.sampling import ResolvedPlan

    limits = DecodeLimits(**settings["limits"])
    plan = ResolvedPlan(**request["plan"])
    with open(media, "rb", buffering=0, closefd=False) as file:
        file.seek(0)
        if request["kind"] == "image":
            frames = read_image(file, limits, result.allocate)
        elif file.read(len(MAGIC)) == MAGIC:
            frames = read_frames(file, plan, limits, result.allocate)
        else:
            frames = read_video(
                file,
                plan,
                limits,
                result.allocate,
                num_threads=settings["num_threads"],
            )
    result.put_seconds(frames.seconds)
    return {"shape": frames.pixels.shape, "sampled_fps": frames.sampled_fps}


def reply_to(
    request: dict[str, Any], media: int, settings: dict[str, Any], result: Result
) -> dict[str, Any]:
    """Decodes the item; the reply, whatever the item does to the decoder.

    Out of memory, the process should not be used again.
    """
    from hippo.errors import MediaError

    try:
        return decode(request, media, settings, result)
    except MediaError as error:
        return {"error": error.message}
    except Exception as error:
        is_short = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if isinstance(error, MemoryError) or is_short:
            return {"is_out_of_memory": True}
        # A library met what it did not expect: of the file's making, and not the operator's log.
        return {
            "error": f"the {request['kind']} cannot be decoded ({type(error).__name__}); it is "
            "damaged: encode it again",
            "unexpected": "".join(traceback.format_exception(error)[-3:]),
        }


def answer(
    channel: socket.socket, request: dict[str, Any], media: int, settings: dict[str, Any]
) -> bool:
    """Decodes and replies; False when this process should not be used again."""
    result = Result()
    reply = reply_to(request, media, settings, result)
    line = json.dumps(reply).encode() + b"\n"
    fds = [result.descriptor] if "shape" in reply else []
    channel.setblocking(True)
    socket.send_fds(channel, [line], fds)
    result.close()
    return "is_out_of_memory" not in reply


def limit_memory(num_bytes: int) -> None:
    """Caps the address space at what is in use now and ``num_bytes`` more."""
    try:
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # not Linux: the wall time alone limits
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, in_use + num_bytes))


def main() -> None:
    """Serves the socket whose descriptor is the first argument, settings (JSON) the second."""
    # Ctrl-C and a stop reach the whole process group; this process ends with its parent's socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    if settings["cpu_core"] is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {settings["cpu_core"]})
    import hippo.video.frames  # noqa: F401  (before the memory is counted)

    limit_memory(settings["limits"]["max_memory_bytes"])
    channel.sendall(b"{}\n")
    pending = bytearray()
    fds: list[int] = []
    with channel, contextlib.suppress(ConnectionError):
        while receive_line(channel, pending, fds):
            if pending.endswith(b"\n"):
                request = json.loads(pending)
                pending.clear()
                try:
                    if not answer(channel, request, fds[0], settings):
                        return
                finally:
                    os.close(fds.pop(0))


if __name__ == "__main__":
    main()
