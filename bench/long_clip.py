"""A clip of as many visual tokens as are asked for, and checkpoints that take it."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np

_PER_SECOND = 2  # frames, as the processor samples them
_TOKEN_PIXELS, _TOKEN_FRAMES = 28, 2  # of Qwen2.5-VL


def num_visual_tokens(num_frames: int, size: int) -> int:
    """Of a clip of ``num_frames`` (even) of ``size`` x ``size`` pixels (a multiple of 28)."""
    if num_frames % _TOKEN_FRAMES or size % _TOKEN_PIXELS:
        raise ValueError(
            f"{num_frames} frames of {size}: expected an even number, and a multiple of 28"
        )
    return num_frames // _TOKEN_FRAMES * (size // _TOKEN_PIXELS) ** 2


def write_clip(path: Path, *, num_frames: int, size: int) -> Path:
    """An mp4 file of a pattern that moves."""
    import av

    y, x = np.mgrid[0:size, 0:size] / size
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = size, size, "yuv420p"
        stream.time_base = Fraction(1, _PER_SECOND)
        for index in range(num_frames):
            phase = index / num_frames
            waves = (x + phase, y + 2 * phase, x * y + phase)
            frame = np.stack([127 + 120 * np.sin(9 * wave) for wave in waves], -1)
            picture = av.VideoFrame.from_ndarray(frame.astype(np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return path


def lift_limits(folder: Path) -> None:
    """Lets a checkpoint's processor take videos of any number of pixels."""
    path = folder / "processor_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["video_processor"]["size"]["longest_edge"] = 1 << 31
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
