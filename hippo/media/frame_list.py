"""The file format for frames that a client sampled itself; standard library only.

A video that begins with ``MAGIC`` is a list of JPEG images: a header, one record per frame, then
the images. Numbers are little-endian.

    8 bytes   MAGIC
    float64   end of the last frame, in seconds since the start of the clip
    uint32    num_frames
    num_frames times: float64 seconds since the start of the clip, uint64 bytes of the frame's image

The clip is the video from which the frames were taken; they may be a part of it.
"""

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from hippo.errors import MediaError

MAGIC = b"\x89HFRMS\r\n"
MAX_LISTED_FRAMES = 65536  # upper bound for all services
MAX_LISTED_S = 99_999.9  # about a day: for the text of later times a prompt has no room
_HEADER = struct.Struct("<8sdI")
_RECORD = struct.Struct("<dQ")


@dataclass(frozen=True, slots=True)
class FrameList:
    """The position of each image in the file, and the frames' times in the clip, in seconds."""

    spans: tuple[tuple[int, int], ...]  # (offset, bytes)
    seconds: tuple[float, ...]
    end_s: float  # when the last frame ends

    @property
    def duration_s(self) -> float:
        """The time from the first frame to the end of the last."""
        return self.end_s - self.seconds[0]


def pack_frames(images: Sequence[bytes], seconds: Sequence[float], *, end_s: float) -> bytes:
    """Returns the file; ``seconds`` must have one time per image."""
    records = [_RECORD.pack(time, len(image)) for time, image in zip(seconds, images, strict=True)]
    return b"".join((_HEADER.pack(MAGIC, end_s, len(images)), *records, *images))


def read_frame_list(file: BinaryIO, size: int) -> FrameList:
    """Reads the header and records of a file of ``size`` bytes; raises MediaError if invalid."""
    file.seek(0)
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise MediaError("the list of frames is cut off; send it whole")
    _, end_s, num_frames = _HEADER.unpack(head)
    if not 1 <= num_frames <= MAX_LISTED_FRAMES:
        raise MediaError(
            f"the list says that it has {num_frames} frames; 1 to {MAX_LISTED_FRAMES} can be sent"
        )
    records = file.read(num_frames * _RECORD.size)
    if len(records) < num_frames * _RECORD.size:
        raise MediaError("the list of frames is cut off; send it whole")
    offset = _HEADER.size + len(records)
    spans, seconds = [], []
    for time, length in _RECORD.iter_unpack(records):
        spans.append((offset, length))
        seconds.append(time)
        offset += length
    if offset != size:
        raise MediaError(
            f"the list of frames says that it has {offset:,} bytes, but it has {size:,}; "
            "send it whole"
        )
    ascends = all(a < b for a, b in itertools.pairwise(seconds))
    # NaN fails these comparisons.
    is_late = seconds[-1] >= MAX_LISTED_S
    if is_late or not (seconds[0] >= 0.0 and ascends and seconds[-1] < end_s < float("inf")):
        raise MediaError(
            "the times of the frames do not ascend from 0 or more to the list's end, or are later "
            "than a day"
        )
    return FrameList(tuple(spans), tuple(seconds), end_s)
