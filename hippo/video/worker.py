"""The process that workers are forked from; a worker decodes one item after another.

    service -> process   a socket for each new worker
    worker -> service    its process id, and what confines it
    service -> worker    the item's kind and plan, and a file with the media
    worker -> service    the frames' shape and times, and a file with their pixels; or an error

Both files are anonymous shared memory: pixels are written once, and no file remains if one of the
processes dies. The process imports neither torch nor a model, reads no media, and has no thread but
the first. A worker is confined (hippo.video.confinement) at once, and ends with its socket.
"""

import errno
import importlib
import math
import os
import socket
import traceback
from collections.abc import Callable
from functools import partial

import numpy as np

from hippo.base.heap import trim_heap
from hippo.base.worker_process import (
    Message,
    map_whole,
    receive_message,
    send_message,
    serve_forks,
    shared_file,
)
from hippo.errors import ContextLengthError, MediaError
from hippo.media.frame_list import MAGIC
from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits
from hippo.types import FramePlan
from hippo.video.canvas import Canvas, ExpensiveError, Frames, Pixels
from hippo.video.confinement import confine
from hippo.video.frames import read_video
from hippo.video.images import read_frames, read_image

# What PyAV and Pillow would import when a file needs it, when none can be opened any more; and the
# readers of hippo.media.formats.IMAGES.
_LATE_MODULES = (
    *("av.audio.codeccontext", "av.audio.stream"),
    *("av.subtitles.codeccontext", "av.subtitles.stream"),
    *(f"PIL.Image{part}" for part in ("Cms", "Color", "File", "Filter", "Palette")),
    *(
        f"PIL.{reader}ImagePlugin"
        for reader in ("Avif", "Bmp", "Gif", "Jpeg", "Mpo", "Png", "Ppm", "Tiff", "WebP")
    ),
)


class Result:
    """The shared file of one result's pixels; ``descriptor`` is -1 before ``allocate``."""

    def __init__(self) -> None:
        self.descriptor = -1

    def allocate(self, num_frames: int, height: int, width: int) -> Pixels:
        """Returns uint8 ``[num_frames, height, width, 3]``; its memory is freed with the array.
        An earlier result is dropped."""
        self.close()
        shape = (num_frames, height, width, 3)
        size = math.prod(shape)
        self.descriptor = shared_file(size)
        return np.frombuffer(map_whole(self.descriptor, size), dtype=np.uint8).reshape(shape)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def decode(kind: str, media: int, canvas: Canvas) -> Frames:
    """Decodes the item in the file ``media``."""
    with open(media, "rb", buffering=0, closefd=False) as file:
        file.seek(0)
        if kind == "image":
            return read_image(file, canvas)
        if file.read(len(MAGIC)) == MAGIC:
            return read_frames(file, canvas)
        return read_video(file, canvas)


def reply_to(kind: str, media: int, canvas: Canvas) -> Message:
    """Decodes the item and returns the reply, also after any error of the decoder.

    After a reply with ``is_out_of_memory`` the process should not be used again.
    """
    try:
        frames = decode(kind, media, canvas)
    except MediaError as error:
        return {"error": error.message}
    except ExpensiveError:
        return {"is_expensive": True}
    except ContextLengthError as error:
        return {"error": error.message, "is_too_long": True}
    except Exception as error:
        is_short = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if isinstance(error, MemoryError) or is_short:
            most = canvas.limits.max_memory_bytes // 2**20
            return {
                "error": f"decoding the {kind} needs more than the {most:,} MiB of memory allowed: "
                "send a smaller one",
                "is_out_of_memory": True,
            }
        # A library failed on a damaged file; the client's error, so not for the operator's log.
        return {
            "error": f"the {kind} cannot be decoded ({type(error).__name__}); it is damaged: "
            "encode it again",
            "unexpected": "".join(traceback.format_exception(error)[-3:]),
        }
    return {
        "shape": frames.pixels.shape,
        "seconds": frames.seconds,
        "sampled_fps": frames.sampled_fps,
        "notes": frames.notes,
    }


def serve(settings: Message, channel: socket.socket) -> None:
    """Decodes what ``channel`` asks for."""
    limits = DecodeLimits(**settings["limits"])
    reply: Message = {"pid": os.getpid(), "confined": confine(limits.max_memory_bytes)}
    send_message(channel, reply)  # ready
    while "is_out_of_memory" not in reply and (received := receive_message(channel)):
        request, media = received
        result = Result()
        options = settings["num_threads"], request["max_cost_s"]
        try:
            plan, frames = FramePlan(**request["plan"]), FrameLimits(**request["frame_limits"])
            canvas = Canvas(plan, limits, frames, result.allocate, *options)
            reply = reply_to(request["kind"], media, canvas)
            send_message(channel, reply, *([result.descriptor] if "shape" in reply else []))
        finally:
            result.close()
            os.close(media)
        trim_heap()  # frames of many sizes fragment it, by some kilobytes an item


def begin(settings: Message) -> Callable[[socket.socket], None]:
    """Prepares the process; returns what serves a worker's socket."""
    if settings["cpu_core"] is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {settings["cpu_core"]})
    for name in _LATE_MODULES:
        importlib.import_module(name)
    return partial(serve, settings)


if __name__ == "__main__":
    serve_forks(begin)
