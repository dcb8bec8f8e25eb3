"""Mutated media through the service's decoder: no file may be more than an error of its own."""

import re
from collections.abc import Callable, Sequence

from hippo.errors import MediaError
from hippo.media.limits import DecodeLimits
from hippo.media.resizing import FrameLimits
from hippo.models.interface.base import DecodedMedia
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.fuzz.corpus import encode, seeds
from tests.fuzz.findings import Findings
from tests.fuzz.mutate import generator, mutated

LIMITS = DecodeLimits(
    max_frames=16,
    max_pixels=256 * 256,
    max_duration_s=600.0,
    max_stored_frames=2000,
    timeout_s=5.0,
    max_memory_bytes=192 << 20,
)
PLAN = FramePlan(fps=2.0, min_frames=4, max_frames=8, max_visual_tokens=200)
FRAME_LIMITS = FrameLimits(
    side_multiple=28,
    video_pixels=(3136, 32_768),
    image_pixels=(3136, 32_768),
    max_video_tokens=1000,
)
_EVERY = 50  # inputs after which a good file must be decoded
_UNFORESEEN = re.compile(r"cannot be decoded \(\w+\)")


async def fuzz_media(num_inputs: int, findings: Findings, advance: Callable[[], None]) -> None:
    """Decodes ``num_inputs`` mutated files, one after the other, whose decoder's processes may die
    or stall of them: each must be decoded within the limits or become a MediaError that was
    foreseen, and a good file must be decoded afterwards."""
    good = Media(MediaKind.VIDEO, encode("mp4", "libx264"))
    corpus = [(kind, data) for kind, _, data in seeds()]
    findings.figures["corpus files"] = len(corpus)
    async with MediaDecoder(LIMITS, num_workers=1) as decoder:
        decoder.frame_limits = FRAME_LIMITS
        for number in range(num_inputs):
            outcome = await _decode(decoder, _input(corpus, findings.seed, number))
            findings.outcomes[outcome] += 1
            if number % _EVERY == 0 and not outcome.startswith("failed"):
                again = await _decode(decoder, good)
                outcome = outcome if again == "decoded" else f"failed: a good file then: {again}"
            if outcome.startswith("failed"):
                findings.fail(number, outcome)
            advance()


def _input(seeds: Sequence[tuple[MediaKind, bytes]], seed: int, number: int) -> Media:
    """Input ``number``; one in 16 is sent as the other kind."""
    rng = generator(seed, number)
    kind, data = rng.choice(seeds)
    data = mutated(rng, data, [other for _, other in seeds])
    if rng.random() < 1 / 16:
        kind = MediaKind.IMAGE if kind is MediaKind.VIDEO else MediaKind.VIDEO
    return Media(kind, data)


async def _decode(decoder: MediaDecoder, media: Media) -> str:
    """What became of it: "decoded", the error without what differs from file to file, or what
    failed."""
    try:
        decoded = await decoder.decode(media, PLAN)
    except MediaError as error:
        if _UNFORESEEN.search(error.message):
            return f"failed: an error that was not foreseen: {error.message}"
        return re.sub(r"'[^']*'|\d[\d,.]*", "_", re.split(r"[:;(]", error.message)[0]).strip()[:60]
    except Exception as error:
        return f"failed: {error!r}"
    return "decoded" if _is_sound(decoded) else f"failed: a wrong reply: {decoded}"


def _is_sound(decoded: DecodedMedia) -> bool:
    num_frames, height, width, _ = decoded.frames.shape
    is_within = num_frames <= LIMITS.max_frames and height * width <= LIMITS.max_pixels
    is_whole = len(decoded.frame_seconds) == num_frames
    return is_within and is_whole and 0 < decoded.sampled_fps < float("inf")
