"""Measures decoding of videos of real sizes, as the services decode them for Qwen2.5-VL.

    python -m bench.decode
    python -m bench.decode --torchcodec    beside it: torchcodec (0.13 loads with torch 2.13)

Makes the files with ffmpeg (5 GB, in --folder, where later runs find them) and prints a table. A
long file is one of 20 s repeated, with a key frame every 250 frames. torchcodec decodes the same
number of frames, evenly spaced, and resizes them to the same size, with one thread for each core.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av

from hippo.base.local_files import LocalFiles
from hippo.errors import MediaError
from hippo.media.resizing import FrameLimits
from hippo.models.loading._torchvision import ensure_torchvision
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder

# Of Qwen2.5-VL (hippo.models.families.qwen_prompt).
LIMITS = FrameLimits(
    side_multiple=28,
    video_pixels=(128 * 28 * 28, 768 * 28 * 28),
    image_pixels=(3136, 12845056),
    max_video_tokens=115_200,
)
_H264 = "-c:v libx264 -preset ultrafast -pix_fmt yuv420p"
_HEVC = "-c:v libx265 -preset ultrafast -pix_fmt yuv420p -x265-params log-level=none"


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A file and how it is made: ``source`` of lavfi, encoded, and repeated."""

    title: str
    file: str
    source: str
    encoder: str
    num_frames: int = 0  # 0: two a second
    num_repeats: int = 1


_FILM = ("testsrc2=s=1920x1080:r=24:d=20,noise=alls=6:allf=t", f"{_H264} -bf 2 -g 250 -b:v 4M")
CLIPS = (
    VideoFile(
        "10 s, 1080p", "clip.mp4", "testsrc2=s=1920x1080:r=30:d=10", f"{_H264} -bf 2 -b:v 8M"
    ),
    VideoFile("10 s, 4K HEVC, turned", "phone.mov", "testsrc2=s=3840x2160:r=30:d=10", _HEVC),
    VideoFile("10 s, 120 fps, no sound", "slow.mp4", "testsrc2=s=1280x720:r=120:d=10", _H264),
    VideoFile("3 frames, gif", "three.gif", "testsrc2=s=480x270:r=2:d=1.5", ""),
    VideoFile(
        "60 s, 1080p, variable rate",
        "screen.mp4",
        "testsrc2=s=1920x1080:r=30:d=60",
        rf"-vf select=not(mod(n\,11))+lt(mod(n\,200)\,30) -fps_mode vfr {_H264}",
    ),
    VideoFile("30 min, 1080p", "half.mp4", *_FILM, 2, 90),
    VideoFile("1 h, 1080p", "lecture.mp4", *_FILM, 128, 180),
    VideoFile("2 h, 1080p", "film.mp4", *_FILM, 128, 360),
    VideoFile("2 h, 1080p, mkv", "film.mkv", *_FILM, 128, 360),
    VideoFile("2 h, 1080p, default frames", "film.mp4", *_FILM, 0, 360),
)


def main() -> None:
    """Makes the files and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hippo-decode")
    parser.add_argument("--torchcodec", action="store_true", help="measure torchcodec as well")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    columns = ["video", "MB", "frames", "size", "visual tokens", "seconds"]
    columns += ["torchcodec"] if args.torchcodec else []
    write = sys.stdout.write
    write(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n")
    for clip in CLIPS:
        path = make(clip, args.folder)
        row = [clip.title, f"{path.stat().st_size / 1e6:,.0f}"]
        try:
            count, height, width, seconds = asyncio.run(measure(path, clip))
            tokens = count // 2 * height * width // 28**2
            row += [f"{count}", f"{width} x {height}", f"{tokens:,}", f"{seconds:.2f}"]
            row += [torchcodec_seconds(path, count, (height, width))] if args.torchcodec else []
        except MediaError as error:
            row += [error.message, *[""] * (len(columns) - 3)]
        write(f"| {' | '.join(row)} |\n")
        sys.stdout.flush()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    write(f"\nLargest process: {peak:,.0f} MiB\n")


def make(clip: VideoFile, folder: Path) -> Path:
    """Returns the clip's file, which is made if it is not there."""
    path = folder / clip.file
    if path.exists():
        return path
    once = folder / f"once-{clip.file}"
    ffmpeg("-f", "lavfi", "-i", clip.source, *clip.encoder.split(), str(once))
    if clip.file == "phone.mov":
        turn(once, path)
    else:
        repeats = str(clip.num_repeats - 1)
        ffmpeg("-stream_loop", repeats, "-i", str(once), "-c", "copy", str(path))
    once.unlink()
    return path


def turn(source: Path, target: Path) -> None:
    """Copies a video with a rotation by a quarter turn."""
    with av.open(str(source)) as given, av.open(str(target), "w") as turned:
        stream = turned.add_stream_from_template(given.streams.video[0])
        stream.set_display_rotation(90)
        for packet in given.demux(video=0):
            if packet.size:
                packet.stream = stream
                turned.mux(packet)


def ffmpeg(*arguments: str) -> None:
    """Runs ffmpeg; raises CalledProcessError."""
    subprocess.run(["ffmpeg", "-v", "error", "-y", *arguments], check=True)


async def measure(path: Path, clip: VideoFile) -> tuple[int, int, int, float]:
    """Returns the number of frames, their height and width, and the seconds. Raises MediaError."""
    status = path.stat()
    media = Media(
        MediaKind.VIDEO, b"", str(path), num_bytes=status.st_size, modified_ns=status.st_mtime_ns
    )
    async with MediaDecoder(files=LocalFiles([path.parent])) as decoder:
        decoder.frame_limits = LIMITS
        began_s = time.perf_counter()
        decoded = await decoder.decode(media, FramePlan(num_frames=clip.num_frames))
        seconds = time.perf_counter() - began_s
    count, height, width, _ = decoded.frames.shape
    return count, height, width, seconds


def torchcodec_seconds(path: Path, count: int, size: tuple[int, int]) -> str:
    """Returns the seconds that torchcodec takes for ``count`` frames of this height and width."""
    ensure_torchvision()  # torchcodec's resizing is torchvision's
    decoders: Any = importlib.import_module("torchcodec.decoders")
    transforms: Any = importlib.import_module("torchcodec.transforms")
    began_s = time.perf_counter()
    try:
        decoder = decoders.VideoDecoder(
            str(path),
            dimension_order="NHWC",
            num_ffmpeg_threads=0,
            seek_mode="approximate",
            transforms=[transforms.Resize(size)],
        )
        last = decoder.metadata.num_frames - 1
        decoder.get_frames_at([round(last * i / max(1, count - 1)) for i in range(count)])
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return f"{time.perf_counter() - began_s:.2f}"


if __name__ == "__main__":
    main()
