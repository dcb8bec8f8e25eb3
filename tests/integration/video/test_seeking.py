"""Frames that are sought from key frames equal those of decoding the whole file."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest

from hippo.types import FramePlan
from hippo.video import frames as reading
from hippo.video.canvas import Canvas, Frames, Pixels
from hippo.video.limits import DecodeLimits
from hippo.video.resizing import FrameLimits
from hippo.video.sampling import resolve_plan
from hippo.video.seeking import SeekError

pytestmark = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg makes the files")

# Twelve seconds: a picture that moves and has noise, so that no two frames are equal.
SOURCE = ("-f", "lavfi", "-i", "testsrc=s=160x120:r=25:d=12,noise=alls=20:allf=t")
H264 = ("-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p")
HEVC = ("-x265-params", "log-level=none:keyint=50:open-gop=1", "-pix_fmt", "yuv420p")
VARIABLE = ("-vf", r"select=not(mod(n\,7))+lt(mod(n\,50)\,9)", "-fps_mode", "vfr")
PLANS = (FramePlan(num_frames=2), FramePlan(num_frames=7), FramePlan(fps=1.5), FramePlan(fps=12.0))

# Name: the extension, the encoder's options, and where the timeline is from.
FILES: dict[str, tuple[str, Sequence[str], str]] = {
    "long GOPs with B-frames": ("mp4", (*H264, "-g", "100", "-bf", "3"), "index"),
    "short GOPs": ("mp4", (*H264, "-g", "12"), "index"),
    "open GOPs": ("mp4", (*H264, "-x264-params", "open-gop=1:keyint=40:bframes=3"), "index"),
    "hevc": ("mp4", ("-c:v", "libx265", "-preset", "ultrafast", *HEVC), "index"),
    "gif of 3 frames": ("gif", ("-frames:v", "3"), "packets"),
    "120 frames a second": ("mp4", (*H264, "-r", "120", "-t", "4"), "index"),
    "index at the end": ("mov", (*H264, "-g", "50"), "index"),
    "variable rate": ("mp4", (*H264, "-g", "30", *VARIABLE), "packets"),
    "matroska": ("mkv", (*H264, "-g", "60"), "packets"),
    "matroska without an index": ("mkv", (*H264, "-g", "60", "-live", "1"), "packets"),
    "mpeg-ts": ("ts", (*H264, "-g", "60"), "packets"),
    "mpeg-ts with open GOPs": ("ts", (*H264, "-x264-params", "open-gop=1:keyint=40"), "packets"),
    "avi": ("avi", ("-c:v", "mpeg4", "-g", "50"), "packets"),
    "fragments": ("mp4", (*H264, "-g", "50", "-movflags", "frag_keyframe+empty_moov"), "packets"),
    "webm": (
        "webm",
        ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8", "-g", "75"),
        "packets",
    ),
    "intra refresh": ("ts", (*H264, "-x264-params", "intra-refresh=1:keyint=60"), "everything"),
    "raw": ("h264", (*H264, "-g", "50"), "everything"),
}


def ffmpeg(*arguments: str) -> None:
    subprocess.run(["ffmpeg", "-v", "error", "-y", *arguments], check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("videos")


def decode(data: bytes, plan: FramePlan) -> Frames:
    limits = DecodeLimits()
    canvas = Canvas(resolve_plan(plan, limits), limits, FrameLimits(), _allocate)
    return reading.read_video(io.BytesIO(data), canvas)


def _allocate(num_frames: int, height: int, width: int) -> Pixels:
    return np.zeros((num_frames, height, width, 3), np.uint8)


def check(data: bytes, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Compares the frames of all plans with those of the whole file; returns what was used."""
    used = set[str]()
    for name, way in (("timeline_of_packets", "packets"), ("all_frames", "everything")):
        function = getattr(reading, name)

        def noted(*args: object, function=function, way=way) -> object:  # type: ignore[no-untyped-def]
            used.add(way)
            return function(*args)

        monkeypatch.setattr(reading, name, noted)
    sought = [decode(data, plan) for plan in PLANS]
    seen = frozenset(used) or frozenset({"index"})

    def refuse(*_: object) -> None:
        raise SeekError

    monkeypatch.setattr(reading, "seek_frames", refuse)
    for plan, frames in zip(PLANS, sought, strict=True):
        whole = decode(data, plan)
        assert frames.seconds == whole.seconds
        assert frames.sampled_fps == whole.sampled_fps
        assert np.array_equal(frames.pixels, whole.pixels)
    return set(seen)


@pytest.mark.parametrize("name", FILES)
def test_frames_equal_those_of_the_whole_file(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension, options, source = FILES[name]
    path = folder / f"{name}.{extension}"
    ffmpeg(*SOURCE, *options, str(path))
    used = check(path.read_bytes(), monkeypatch)
    assert used == {"index"} if source == "index" else source in used
    assert ("everything" in used) == (source == "everything")


def test_a_file_cut_by_an_edit_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, path = folder / "whole.mp4", folder / "cut.mp4"
    ffmpeg(*SOURCE, *H264, "-g", "50", "-bf", "2", str(whole))
    ffmpeg("-ss", "3.3", "-i", str(whole), "-c", "copy", str(path))
    check(path.read_bytes(), monkeypatch)


def test_the_whole_file_gives_the_frames_that_a_player_shows(folder: Path) -> None:
    path = folder / "player.mp4"
    ffmpeg(*SOURCE, *H264, "-g", "80", "-bf", "3", str(path))
    with av.open(str(path)) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    frames = decode(path.read_bytes(), FramePlan(num_frames=10))
    places = [round(seconds * 25) for seconds in frames.seconds]
    assert places == [place * len(shown) // 10 for place in range(10)]
    assert all(
        np.array_equal(frame, shown[place])
        for frame, place in zip(frames.pixels, places, strict=True)
    )


def test_only_the_bytes_near_the_frames_are_read(folder: Path) -> None:
    path = folder / "long.mp4"
    ffmpeg(*SOURCE, *H264, "-g", "25", "-crf", "1", "-movflags", "faststart", str(path))
    data = path.read_bytes()

    class Counting(io.BytesIO):
        num_read = 0

        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            self.num_read += len(found)
            return found

    file = Counting(data)
    limits = DecodeLimits()
    plan = resolve_plan(FramePlan(num_frames=2), limits)
    frames = reading.read_video(file, Canvas(plan, limits, FrameLimits(), _allocate))
    assert len(frames.pixels) == 2
    assert file.num_read < len(data) / 2
