"""Small random checkpoints as a pair of models, and frames for them."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hippo.models.interface.base import DecodedMedia, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_model
from hippo.types import FramePlan, Media, MediaKind


class NoiseDecoder:
    """Frames of noise by the data instead of a decoded file; of a video as many as it has bytes."""

    async def decode(
        self, media: Media, plan: FramePlan, *, salt: str = "", client: str = ""
    ) -> DecodedMedia:
        generator = torch.Generator().manual_seed(zlib.crc32(media.data))
        shape = (len(media.data) if media.kind is MediaKind.VIDEO else 1, 84, 112, 3)
        frames = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return DecodedMedia(media.kind, frames, tuple(i / 2 for i in range(shape[0])), 2.0)


class Pair(NamedTuple):
    target: VideoLanguageModel
    draft: VideoLanguageModel


def load(folder: Path, **changes: Any) -> VideoLanguageModel:
    """In float32, with two slots of 512 tokens."""
    options: dict[str, Any] = {"dtype": "float32", "num_slots": 2, "max_context_length": 512}
    return load_model(LoadPlan(str(folder), **(options | changes)))
