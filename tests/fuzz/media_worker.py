"""Decodes mutated media in this process, one after the other, until it dies of one.

``python -m tests.fuzz.media_worker SEED START END CORPUS LIMITS``: CORPUS is a folder that
tests.fuzz.media wrote. A line of JSON an input goes to the standard output, in order, so that the
parent knows which input a death belongs to.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from hippo.base.worker_process import shared_file
from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits
from hippo.media.sampling import resolve_plan
from hippo.types import FramePlan, MediaKind
from hippo.video import worker
from hippo.video.confinement import confine
from tests.fuzz.mutate import generator, mutated

PLAN = FramePlan(fps=2.0, min_frames=4, max_frames=8, max_visual_tokens=200)
FRAME_LIMITS = FrameLimits(
    side_multiple=28,
    video_pixels=(3136, 32_768),
    image_pixels=(3136, 32_768),
    max_video_tokens=1000,
)

Seeds = list[tuple[MediaKind, bytes]]


def read_corpus(folder: Path) -> Seeds:
    """The files of a folder; the suffix is the kind."""
    return [
        (MediaKind(path.suffix[1:]), path.read_bytes())
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]


def make_input(seeds: Seeds, seed: int, number: int) -> tuple[MediaKind, bytes]:
    """Input ``number``; one in 16 is sent as the other kind."""
    rng = generator(seed, number)
    kind, data = rng.choice(seeds)
    data = mutated(rng, data, [other for _, other in seeds])
    if rng.random() < 1 / 16:
        kind = MediaKind.IMAGE if kind is MediaKind.VIDEO else MediaKind.VIDEO
    return kind, data


def decode_once(kind: MediaKind, data: bytes, limits: DecodeLimits) -> dict[str, Any]:
    """The worker's own reply to one item, and its result's size checked."""
    descriptor = shared_file(len(data))
    result = worker.Result()
    try:
        os.write(descriptor, data)
        request = {
            "kind": kind.value,
            "plan": dataclasses.asdict(resolve_plan(PLAN, limits, FRAME_LIMITS, kind)),
            "frame_limits": dataclasses.asdict(FRAME_LIMITS),
            "max_cost_s": None,
        }
        reply = worker.reply_to(request, descriptor, limits, 1, result)
        if "shape" in reply:
            num_frames, height, width, _ = reply["shape"]
            is_whole = os.fstat(result.descriptor).st_size == math.prod(reply["shape"])
            is_whole &= len(reply["seconds"]) == num_frames
            is_within = num_frames <= limits.max_frames and height * width <= limits.max_pixels
            is_sound = 0 < reply["sampled_fps"] < float("inf")
            if not (is_whole and is_within and is_sound):
                return {"wrong": f"{reply} in {os.fstat(result.descriptor).st_size} bytes"}
        return reply
    finally:
        result.close()
        os.close(descriptor)


def main() -> None:
    """Decodes inputs START to END."""
    seed, start, end = (int(text) for text in sys.argv[1:4])
    seeds = read_corpus(Path(sys.argv[4]))
    limits = DecodeLimits(**json.loads(sys.argv[5]))
    worker.import_late_modules()
    confine(limits.max_memory_bytes)
    for number in range(start, end):
        kind, data = make_input(seeds, seed, number)
        reply = decode_once(kind, data, limits)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
        if "is_out_of_memory" in reply:
            return


if __name__ == "__main__":
    main()
