"""Clips as mp4 files: writing and reading, the bundled samples, held-out clips."""

import io
import json
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, Literal

import av
import numpy as np

from demo.world import scenes as world
from demo.world import texts
from demo.world.scenes import FrameArray, Scene
from demo.world.sizes import Size

SAMPLES = Path(__file__).resolve().parents[1] / "clips"
FRAME_RATES = (4, 5, 8, 10, 12, 16, 24)
HELD_OUT = 1_000_003  # the first part of every held-out scene's seed, and of no training seed
SAMPLED_PER_SECOND = 2

SHORT_SIZES = (Size(112, 112, 8, 0.4, 5), Size(140, 140, 8, 0.3, 6), Size(112, 168, 8, 0.3, 6))
LONG_SIZES = (Size(336, 336, 16, 0.6, 8), Size(336, 336, 14, 0.4, 8))
# The sizes of the model card's evaluation, in training's proportions; durations vary.
MIXED_SIZES = (
    Size(112, 112, 8, 0.4, 5),
    Size(140, 140, 8, 0.2, 6),
    Size(112, 168, 8, 0.1, 6),
    Size(168, 168, 12, 0.1, 7),
    Size(224, 224, 8, 0.1, 8),
    Size(336, 336, 16, 0.1, 8),
)

Kind = Literal["short", "long", "mixed"]
_SIZES: dict[Kind, tuple[Size, ...]] = {
    "short": SHORT_SIZES,
    "long": LONG_SIZES,
    "mixed": MIXED_SIZES,
}


@dataclass(frozen=True, slots=True)
class Clip:
    """A held-out scene with the size and frame rate of its file."""

    name: str
    scene: Scene
    size: Size
    frame_rate: int


@dataclass(frozen=True, slots=True)
class ClipFacts:
    """The facts of a clip's file: its size, and a question with its answer."""

    file: str
    height: int
    width: int
    duration_s: float
    frame_rate: int
    num_visual_tokens: int
    question: str
    answer: str


def held_out(kind: Kind, index: int, *, seed: int = 0, min_objects: int = 1) -> Clip:
    """Returns the held-out clip of an index; its scene does not occur in training."""
    stream = list(_SIZES).index(kind)
    rng = np.random.default_rng((HELD_OUT, seed, stream, index))
    sizes = _SIZES[kind]
    shares = np.array([size.share for size in sizes])
    size = sizes[int(rng.choice(len(sizes), p=shares / shares.sum()))]
    frame_rate = int(rng.choice(FRAME_RATES))
    while True:
        scene = world.sample_scene(
            rng,
            height=size.height,
            width=size.width,
            duration_s=size.num_frames / SAMPLED_PER_SECOND,
            min_objects=min_objects,
            max_objects=size.max_objects,
        )
        if len(scene.objects) >= min_objects:
            return Clip(f"{kind}-{index:03d}", scene, size, frame_rate)


def write_mp4(scene: Scene, goal: Path | BinaryIO, *, frame_rate: int) -> None:
    """Render the scene at `frame_rate` into an H.264 file."""
    count = round(scene.duration_s * frame_rate)
    frames = world.render(scene, np.arange(count) / frame_rate)
    with av.open(
        str(goal) if isinstance(goal, Path) else goal, mode="w", format="mp4"
    ) as container:
        stream = container.add_stream("libx264", rate=Fraction(frame_rate))
        stream.width, stream.height, stream.pix_fmt = scene.width, scene.height, "yuv420p"
        stream.options = {"crf": "18", "preset": "veryfast", "threads": "1"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def read_mp4(source: Path | BinaryIO) -> tuple[FrameArray, float]:
    """Returns all frames of a file, and its frames per second."""
    with av.open(str(source) if isinstance(source, Path) else source, mode="r") as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or 1)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    return np.stack(frames), rate


def sample_like_processor(frames: FrameArray, frame_rate: float) -> FrameArray:
    """Returns the frames that the video processor samples at two per second."""
    total = len(frames)
    wanted = min(max(total / frame_rate * SAMPLED_PER_SECOND, 4), total)
    count = int(wanted // 2) * 2
    return frames[np.arange(0, total, total / count).astype(np.int64)[:count]]


def through_codec(clip: Clip) -> FrameArray:
    """Returns the sampled frames of the clip after encoding to mp4 (in memory)."""
    buffer = io.BytesIO()
    write_mp4(clip.scene, buffer, frame_rate=clip.frame_rate)
    buffer.seek(0)
    return sample_like_processor(*read_mp4(buffer))


def write_clip(clip: Clip, folder: Path) -> ClipFacts:
    """Write the clip's mp4 file into the folder; returns its facts."""
    file, scene = f"{clip.name}.mp4", clip.scene
    write_mp4(scene, folder / file, frame_rate=clip.frame_rate)
    return ClipFacts(
        file=file,
        height=scene.height,
        width=scene.width,
        duration_s=scene.duration_s,
        frame_rate=clip.frame_rate,
        num_visual_tokens=clip.size.num_visual,
        question=texts.DETAILED[0],
        answer=texts.detailed(scene),
    )


def write_bench_clips(
    folder: Path, *, num_clips: int, kind: Literal["short", "long"], seed: int = 0
) -> list[ClipFacts]:
    """Write held-out clips with answers of 100 tokens and more, and `facts.json`, into the folder.

    kind: "short" has at most 128 visual tokens, "long" at least 1,000. Files and facts depend only
    on the arguments; no scene occurs in training. Every clip has five objects or more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        write_clip(held_out(kind, index, seed=seed, min_objects=5), folder)
        for index in range(num_clips)
    ]
    (folder / "facts.json").write_text(
        json.dumps([asdict(facts) for facts in written], indent=1) + "\n"
    )
    return written


def read_facts(folder: Path) -> list[ClipFacts]:
    """Returns the facts of the folder's clips."""
    return [ClipFacts(**entry) for entry in json.loads((folder / "facts.json").read_text())]


def sample_clips() -> list[tuple[Path, ClipFacts]]:
    """Returns the bundled sample clips with their facts."""
    return [(SAMPLES / facts.file, facts) for facts in read_facts(SAMPLES)]
