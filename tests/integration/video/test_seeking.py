"""Frames that are sought from key frames equal those of decoding the whole file."""

import functools
import io
from typing import Any
from unittest.mock import Mock

import av
import numpy as np
import pytest

from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits
from hippo.media.sampling import resolve_plan
from hippo.types import FramePlan
from hippo.video import frames as reading
from hippo.video.canvas import Canvas, Frames, Pixels
from hippo.video.seeking import SeekError
from tests.fuzz.corpus import encode

NUM_FRAMES = 300  # twelve seconds
H264: dict[str, Any] = {"container": "mp4", "codec": "libx264"}
PLANS = (FramePlan(num_frames=2), FramePlan(num_frames=7), FramePlan(fps=1.5), FramePlan(fps=12.0))


def gop(length: int, **options: str) -> dict[str, str]:
    return {"preset": "veryfast", "g": str(length), "sc_threshold": "0", **options}


def x264(options: str) -> dict[str, str]:
    return {"preset": "veryfast", "x264-params": options}


# Milliseconds of the frames that are left of 25 a second: every seventh, and the first nine of 50.
VARIABLE = [40 * number for number in range(NUM_FRAMES) if number % 7 == 0 or number % 50 < 9]

FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}
X265 = {"preset": "ultrafast", "x265-params": "log-level=none:keyint=50:open-gop=1"}
VP9 = {"deadline": "realtime", "cpu-used": "8", "g": "75"}


def of(container: str, options: dict[str, str], codec: str = "libx264", **more: Any) -> Any:
    return {"container": container, "codec": codec, "options": options, **more}


# How each file is encoded, by where the timeline is from.
FROM_INDEX: dict[str, Any] = {
    "long GOPs with B-frames": of("mp4", gop(100, bf="3")),
    "short GOPs": of("mp4", gop(12)),
    "open GOPs": of("mp4", x264("open-gop=1:keyint=40:bframes=3")),
    "hevc": of("mp4", X265, "libx265"),
    "120 frames a second": of("mp4", gop(250), fps=120, num_frames=480),
    "index at the end": of("mov", gop(50)),
}
FROM_PACKETS: dict[str, Any] = {
    "variable rate": of("mp4", gop(30), ticks=VARIABLE, num_frames=len(VARIABLE)),
    "matroska": of("matroska", gop(60)),
    "matroska without an index": of("matroska", gop(60), container_options={"live": "1"}),
    "mpeg-ts": of("mpegts", gop(60)),
    "mpeg-ts with open GOPs": of("mpegts", x264("open-gop=1:keyint=40")),
    "avi": of("avi", {"g": "50"}, "mpeg4"),
    "fragments": of("mp4", gop(50), container_options=FRAGMENTS),
    "webm": of("webm", VP9, "libvpx-vp9"),
}
DECODED_WHOLE: dict[str, Any] = {
    "gif of 3 frames": of("gif", {}, "gif", pix_fmt="rgb8", num_frames=3),
    "intra refresh": of("mpegts", x264("intra-refresh=1:keyint=60:scenecut=0")),
    "raw": of("h264", gop(50)),
}
FILES = FROM_INDEX | FROM_PACKETS | DECODED_WHOLE


@functools.cache
def picture(number: int, width: int, height: int) -> Pixels:
    """A square that moves over a slope, with noise: no two frames are equal."""
    noise = np.random.default_rng(number).integers(-20, 21, (height, width, 3))
    slope = np.linspace(30, 220, width)[None, :, None]
    pixels = np.clip(slope + noise, 0, 255).astype(np.uint8)
    left, top = (number * 3) % (width - 24), (number * 2) % (height - 24)
    pixels[top : top + 24, left : left + 24] = (220, 30 + number % 200, 40)
    return pixels


def encoded(**wishes: Any) -> bytes:
    """Twelve seconds at 25 frames a second, if ``wishes`` say no other."""
    size = {"num_frames": NUM_FRAMES, "fps": 25, "width": 80, "height": 56}
    return encode(**{**size, "paint": picture, **wishes})


def cut(data: bytes, seconds: float) -> bytes:
    """The packets from the key frame before ``seconds`` on; an edit list leaves out what is before
    them."""
    cut_file = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(cut_file, "w", format="mp4") as output:
        stream = source.streams.video[0]
        copied = output.add_stream_from_template(stream)
        assert stream.time_base is not None
        start = round(seconds / stream.time_base)
        source.seek(start, stream=stream)
        for packet in source.demux(stream):
            if packet.dts is None or packet.pts is None:
                continue  # the end
            packet.pts, packet.dts = packet.pts - start, packet.dts - start
            packet.stream = copied
            output.mux(packet)
    return cut_file.getvalue()


def decode(data: bytes, plan: FramePlan, file: io.BytesIO | None = None) -> Frames:
    def allocate(*shape: int) -> Pixels:
        return np.zeros((*shape, 3), np.uint8)

    limits = DecodeLimits()
    canvas = Canvas(resolve_plan(plan, limits), limits, FrameLimits(), allocate)
    return reading.read_video(file or io.BytesIO(data), canvas)


def check(data: bytes, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Compares the frames of all plans with those of the whole file; returns what was used beside
    the index."""
    ways = {
        name: Mock(side_effect=getattr(reading, name))
        for name in ("timeline_of_packets", "all_frames")
    }
    for name, way in ways.items():
        monkeypatch.setattr(reading, name, way)
    sought = [decode(data, plan) for plan in PLANS]
    used = {name for name, way in ways.items() if way.called}
    monkeypatch.setattr(reading, "seek_frames", Mock(side_effect=SeekError))
    for plan, frames in zip(PLANS, sought, strict=True):
        whole = decode(data, plan)
        assert frames.seconds == whole.seconds
        assert frames.sampled_fps == whole.sampled_fps
        assert np.array_equal(frames.pixels, whole.pixels)
    return used


@pytest.mark.parametrize("name", FILES)
def test_frames_equal_those_of_the_whole_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = check(encoded(**FILES[name]), monkeypatch)
    assert (not used) == (name in FROM_INDEX)
    assert ("all_frames" in used) == (name in DECODED_WHOLE)


def test_a_file_cut_by_an_edit_list(monkeypatch: pytest.MonkeyPatch) -> None:
    data = cut(encoded(**H264, options=gop(50, bf="2")), 3.3)
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        assert stream.time_base is not None and stream.duration is not None
        assert stream.duration * stream.time_base == pytest.approx(12 - 3.3, abs=0.05)
        assert stream.frames > (12 - 3.3 + 1) * 25  # from a key frame on, a second earlier or more
    check(data, monkeypatch)


def test_the_whole_file_gives_the_frames_that_a_player_shows() -> None:
    data = encoded(**H264, options=gop(80, bf="3"))
    with av.open(io.BytesIO(data), "r") as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    frames = decode(data, FramePlan(num_frames=10))
    places = [round(seconds * 25) for seconds in frames.seconds]
    assert places == [place * len(shown) // 10 for place in range(10)]
    assert np.array_equal(frames.pixels, [shown[place] for place in places])


def test_only_the_bytes_near_the_frames_are_read() -> None:
    options = gop(25, crf="1")
    data = encoded(**H264, options=options, container_options={"movflags": "faststart"})

    class Counting(io.BytesIO):
        num_read = 0

        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            self.num_read += len(found)
            return found

    file = Counting(data)
    assert len(decode(data, FramePlan(num_frames=2), file).pixels) == 2
    assert file.num_read < len(data) / 2
