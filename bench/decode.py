"""Measures decoding of videos of real sizes, as the services decode them for Qwen2.5-VL.

    python -m bench.decode

Makes the files with ffmpeg (5 GB, in --folder, where later runs find them) and prints a table. A
long file is one of 20 s repeated, with a key frame every 250 frames.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import av

from hippo.errors import MediaError
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from hippo.video.resizing import FrameLimits

# Of Qwen2.5-VL (hippo.models.qwen_prompt).
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hippo-decode")
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    write = sys.stdout.write
    write("| video | MB | frames | size | visual tokens | seconds |\n|---|---|---|---|---|---|\n")
    for clip in CLIPS:
        path = make(clip, folder)
        size = path.stat().st_size / 1e6
        write(f"| {clip.title} | {size:,.0f} | {asyncio.run(measure(path, clip))}\n")
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


async def measure(path: Path, clip: VideoFile) -> str:
    """Returns the cells of the table's row."""
    status = path.stat()
    media = Media(
        MediaKind.VIDEO, b"", str(path), num_bytes=status.st_size, modified_ns=status.st_mtime_ns
    )
    async with MediaDecoder() as decoder:
        decoder.frame_limits = LIMITS
        began_s = time.perf_counter()
        try:
            decoded = await decoder.decode(media, FramePlan(num_frames=clip.num_frames))
        except MediaError as error:
            return f"{error.message} | | | {time.perf_counter() - began_s:.2f} |"
        seconds = time.perf_counter() - began_s
    count, height, width, _ = decoded.frames.shape
    tokens = count // 2 * height * width // 28**2
    return f"{count} | {width} x {height} | {tokens:,} | {seconds:.2f} |"


if __name__ == "__main__":
    main()
