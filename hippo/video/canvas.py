"""Turns and resizes the planned frames of an item into the memory that the worker returns."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from PIL import Image

from hippo.errors import MediaError
from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits
from hippo.types import FramePlan

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Allocate = Callable[[int, int, int], Pixels]  # (num_frames, height, width) -> [..., 3]

_MATRIX = struct.Struct("=9i")
_DECODED_PER_S = 2e9
_DRAWN_PER_S = 1e8
"""Pixels that one thread decodes, and turns into RGB and resizes, at most: about twice what one
thread of docs/performance.md's Xeon does, 1.2e9 (the film of an hour, most of whose frames no other
refers to and which are skipped) and 5e7. So what is refused does not fit on a faster core either.
"""


class ExpensiveError(Exception):
    """The item costs more than the asked worker's dearest item."""


@dataclass(frozen=True, slots=True)
class Frames:
    """RGB frames (uint8 ``[num_frames, height, width, 3]``), their times in seconds, and what of
    the file could not be used."""

    pixels: Pixels
    seconds: tuple[float, ...]
    sampled_fps: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Canvas:
    """What to decode of one item; ``plan`` is resolved (hippo.media.sampling)."""

    plan: FramePlan
    limits: DecodeLimits
    frame_limits: FrameLimits
    allocate: Allocate
    num_threads: int = 1
    max_cost_s: float | None = None  # the worker's dearest item; None: no limit

    def check_cost(
        self, num_decoded: int, num_drawn: int, size: tuple[int, int], num_threads: int = 1
    ) -> None:
        """Refuses what cannot be done in the time allowed: decoding ``num_decoded`` frames of the
        stored size (width, height), and drawing ``num_drawn`` of them.

        Raises MediaError, and ExpensiveError if another worker is for this item.
        """
        width, height = size
        seconds = width * height * (num_decoded / _DECODED_PER_S + num_drawn / _DRAWN_PER_S)
        if seconds / num_threads > self.limits.timeout_s:
            raise MediaError(
                f"{num_decoded:,} frames of {width} x {height} pixels are to be decoded for the "
                f"{num_drawn:,} that are looked at, which takes at least "
                f"{seconds / num_threads:,.0f} s; {self.limits.timeout_s:g} s are allowed: ask for "
                "fewer frames, or send a shorter or smaller one"
            )
        if self.max_cost_s is not None and seconds > self.max_cost_s:
            raise ExpensiveError

    def allocate_frames(self, num_frames: int, size: tuple[int, int]) -> Pixels:
        """Returns memory for frames of a size (height, width); raises MediaError if too large."""
        height, width = size
        self.limits.check_memory(num_frames, width, height)
        return self.allocate(num_frames, height, width)

    def draw(self, rgb: Pixels, target: Pixels) -> None:
        """Resizes a frame (``[height, width, 3]``) to the size of ``target``, and writes it there.

        A value differs by at most 2 from the value of transformers' processors, which use torch.
        """
        if rgb.shape != target.shape:
            height, width, _ = target.shape
            filter_ = Image.Resampling(self.frame_limits.resample)
            rgb = np.asarray(Image.fromarray(rgb).resize((width, height), filter_))
        target[:] = rgb


@dataclass(frozen=True, slots=True)
class Orientation:
    """How stored pixels become the picture: rows and columns are exchanged, then the columns or the
    rows are reversed."""

    is_transposed: bool = False
    reverses_columns: bool = False
    reverses_rows: bool = False

    @classmethod
    def of(cls, frame: av.VideoFrame) -> "Orientation":
        """Returns the orientation by the frame's display matrix (the file's, or the codec's).

        The matrix ``(a, b, u, c, d, v, x, y, w)`` shows the pixel at (x, y) at (ax + cy, bx + dy).
        An angle between quarter turns is rounded to the nearest of them.
        """
        stored: Any = frame.side_data.get("DISPLAYMATRIX")
        if stored is None:
            return cls()
        a, b, _, c, d, *_ = _MATRIX.unpack(bytes(stored))
        if abs(b) + abs(c) > abs(a) + abs(d):
            return cls(True, c < 0, b < 0)
        return cls(False, a < 0, d < 0)

    def applied(self, pixels: Pixels) -> Pixels:
        """Returns the picture ``[height, width, 3]`` of stored ``pixels``, contiguous."""
        if self.is_transposed:
            pixels = pixels.transpose(1, 0, 2)
        rows, columns = (-1 if each else 1 for each in (self.reverses_rows, self.reverses_columns))
        return np.ascontiguousarray(pixels[::rows, ::columns])
