"""Frames as players show them, where the families' own pipelines read them as they are stored:
high dynamic range, anamorphic pixels and interlaced fields.

libswscale maps high dynamic range too, but takes 4 s to prepare for a video, and the filters zscale
and libplacebo are not in PyAV's FFmpeg; so that is done here, in the size that the model takes.
"""

from fractions import Fraction
from functools import cache
from typing import Any

import av
import av.filter
import numpy as np
from av.video.reformatter import Interpolation

from hippo.video.canvas import Pixels

Table = np.ndarray[Any, np.dtype[np.float32]]

_PQ, _HLG = 16, 18  # AVCOL_TRC_SMPTE2084, AVCOL_TRC_ARIB_STD_B67
_DIFFUSE_WHITE = 203.0  # cd/m², ITU-R BT.2408
_HLG_PEAK, _HLG_GAMMA = 1000.0, 1.2  # cd/m² and system gamma of the reference display, BT.2100
_LUMINANCE = np.array([0.2627, 0.6780, 0.0593], np.float32)  # BT.2020's red, green and blue
_BT2020_TO_BT709 = np.array(  # ITU-R BT.2087
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32
)
_DISPLAY_GAMMA = 2.4  # a display of standard range, BT.1886


def shown_size(width: int, height: int, pixel_aspect: Fraction | None) -> tuple[int, int]:
    """Returns the width and height, with square pixels, of a stored frame whose pixels have an
    aspect (width over height; None or 0: square). Nothing is made smaller."""
    if not pixel_aspect:
        return width, height
    if pixel_aspect > 1:
        return round(width * pixel_aspect), height
    return width, round(height / pixel_aspect)


def deinterlaced(frame: av.VideoFrame) -> av.VideoFrame:
    """Returns the frame with the lines of one field, and those between them, if it is interlaced.
    Raises av.error.FFmpegError."""
    if not frame.interlaced_frame:
        return frame
    graph = av.filter.Graph()
    graph.threads = 1
    source = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base=Fraction(1)
    )
    graph.link_nodes(source, graph.add("estdif", "mode=frame"), graph.add("buffersink"))
    graph.configure()
    graph.push(frame)
    graph.push(None)
    joined = graph.pull()
    assert isinstance(joined, av.VideoFrame)
    return joined


def has_high_range(frame: av.VideoFrame) -> bool:
    return frame.color_trc in (_PQ, _HLG)


def in_standard_range(frame: av.VideoFrame, size: tuple[int, int]) -> Pixels:
    """Returns a frame of high range in a size (height, width), in standard range.

    What is as bright as diffuse white becomes white, and what is brighter too; what is darker keeps
    its brightness.
    """
    height, width = size
    resized = frame.reformat(
        width, height, "rgb48le", interpolation=Interpolation.BICUBIC, threads=1
    )
    values = resized.to_ndarray()
    if frame.color_trc == _PQ:
        light = _light_of_pq()[values]
    else:
        scene = _scene_of_hlg()[values]
        luminance = (scene @ _LUMINANCE)[..., None]
        light = _HLG_PEAK * scene * luminance ** (_HLG_GAMMA - 1)
    light = np.clip(light @ _BT2020_TO_BT709.T / _DIFFUSE_WHITE, 0, 1)
    shown: Pixels = np.rint(255 * light ** (1 / _DISPLAY_GAMMA)).astype(np.uint8)
    return shown


@cache
def _light_of_pq() -> Table:
    """Returns cd/m² of each 16-bit value, by SMPTE ST 2084."""
    power = (np.arange(1 << 16) / 65_535) ** (32 / 2523)
    c1, c2, c3 = 3424 / 4096, 2413 / 128, 2392 / 128
    light = 10_000 * (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** (16_384 / 2610)
    return light.astype(np.float32)


@cache
def _scene_of_hlg() -> Table:
    """Returns the light of the scene, from 0 to 1, of each 16-bit value, by ITU-R BT.2100."""
    signal = np.arange(1 << 16) / 65_535
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene = np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)
    return scene.astype(np.float32)
