"""The vision tower's output by content: a second question about a clip does not look at it again.

    digest of pixels and grid  ──►  features [num_tokens, hidden], on the model's device

The least recently used give way when the bytes are spent. Equal digests are equal pixels (SHA-256),
whoever sent them under whatever name; nothing else is ever handed out.
"""

from __future__ import annotations

import torch


class VisionCache:
    """Features of at most ``max_bytes`` (0: none are kept). Device thread alone; the counts may be
    read from anywhere."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._features: dict[bytes, torch.Tensor] = {}  # the least recently used first

    def get(self, digest: bytes) -> torch.Tensor | None:
        """The item's features ``[num_tokens, hidden]``, not to be written; None if unknown."""
        features = self._features.pop(digest, None)
        if features is None:
            self.num_misses += 1
            return None
        self._features[digest] = features
        self.num_hits += 1
        return features

    def put(self, digest: bytes, features: torch.Tensor) -> None:
        """Keeps an item's features, unless they alone exceed the bound.

        A view is copied, so that what is counted is what is held.
        """
        if features.nbytes > self.max_bytes:
            return
        self._drop(digest)
        while self.num_bytes + features.nbytes > self.max_bytes:
            self._drop(next(iter(self._features)))
        if features.untyped_storage().nbytes() != features.nbytes:
            features = features.clone()
        self._features[digest] = features
        self.num_bytes += features.nbytes

    def _drop(self, digest: bytes) -> None:
        features = self._features.pop(digest, None)
        if features is not None:
            self.num_bytes -= features.nbytes
