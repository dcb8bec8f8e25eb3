"""Held-out clips of the bundled pair's world, as files."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["short", "long"]


@dataclass(frozen=True, slots=True)
class ClipFile:
    """A clip file and the question asked about it."""

    path: Path
    question: str
    is_video_first: bool = True


def held_out_clips(folder: Path, *, kind: Kind, num_clips: int) -> list[ClipFile]:
    """Writes the clips, the same each time, and returns them."""
    from demo.world.clips import write_bench_clips

    folder.mkdir(parents=True, exist_ok=True)
    written = write_bench_clips(folder, num_clips=num_clips, kind=kind)
    return [ClipFile(folder / facts.file, facts.question) for facts in written]


def data_url(clip: bytes) -> str:
    """Returns an mp4 file as a data: URL."""
    return "data:video/mp4;base64," + base64.b64encode(clip).decode()


def filmed_clip(number: int, *, width: int, height: int, num_frames: int, fps: int = 30) -> bytes:
    """Returns an H.264 file of a moving gradient; files of different numbers show other pixels."""
    import numpy as np

    from tests.fuzz.corpus import encode

    # Bytes wrap around at 256.
    across, down = np.meshgrid(np.arange(width, dtype=np.uint8), np.arange(height, dtype=np.uint8))

    def paint(frame: int, width: int, height: int) -> Any:
        shifts = np.array((4 * frame + number, 8 * frame + number // 256, 31 * number)) % 256
        return np.stack((across, down, across + down), axis=-1) + shifts.astype(np.uint8)

    options = {"preset": "ultrafast", "threads": "1"}
    return encode(
        "mp4", "libx264", num_frames=num_frames, fps=fps, width=width, height=height,
        options=options, paint=paint,
    )  # fmt: skip
