"""The fingerprint of a checkpoint, read without loading it."""

from __future__ import annotations

import hashlib
import json

from hippo.models.interface.checkpoint import Checkpoint

# Of each weight file, so many blocks of so many bytes are read: all of a small file, and enough of
# a large one to tell checkpoints of one shape apart in seconds.
_BLOCKS, _BLOCK_BYTES = 16, 1 << 20


def fingerprint(checkpoint: Checkpoint) -> str:
    """Returns the beginning of a SHA-256 of the configuration and of samples of the weights."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for path in sorted(checkpoint.folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as weights:
            for start in range(0, size, max(size // _BLOCKS, _BLOCK_BYTES)):
                weights.seek(start)
                digest.update(weights.read(_BLOCK_BYTES))
    return digest.hexdigest()[:12]
