"""Turns a decoded frame as players show it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import av
import numpy as np

from hippo.video.canvas import Pixels

_MATRIX = struct.Struct("=9i")


@dataclass(frozen=True, slots=True)
class Orientation:
    """How stored pixels become the picture: rows and columns are exchanged, then the columns or the
    rows are reversed."""

    is_transposed: bool = False
    reverses_columns: bool = False
    reverses_rows: bool = False

    @classmethod
    def of(cls, frame: av.VideoFrame) -> Orientation:
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
