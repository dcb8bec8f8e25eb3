"""What a prompt is made of, told apart by content: the keys of what is kept for later ones."""

from __future__ import annotations

import hashlib

import torch

from hippo.types import MediaKind


def visual_digest(kind: MediaKind, pixels: torch.Tensor, parameters: tuple[object, ...]) -> bytes:
    """SHA-256 of all that the vision tower's output for one video or image depends on.

    ``pixels`` (on the CPU, any shape) are what the processor made of it; ``parameters`` are plain
    values besides, such as its grid. Two gigabytes a second, without the interpreter's lock.
    """
    header = (kind.value, str(pixels.dtype), tuple(pixels.shape), parameters)
    digest = hashlib.sha256(repr(header).encode() + b"\0")
    digest.update(pixels.contiguous().view(-1).numpy().data)
    return digest.digest()
