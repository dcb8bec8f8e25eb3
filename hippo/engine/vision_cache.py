"""The vision tower's output by content: a second question about a clip does not look at it again.

    digest of pixels and grid  ──►  features [num_tokens, hidden], on the model's device

Equal digests mean equal pixels (SHA-256), so an entry is used only for the same pixels.
"""

from __future__ import annotations

import torch

from hippo.engine.bounded import BoundedCache


class VisionCache(BoundedCache[bytes, torch.Tensor]):
    """Features by digest; the device thread's."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, size=lambda features: features.nbytes)

    def put(self, key: bytes, value: torch.Tensor) -> None:
        """Keeps an item's features; a view is copied, so that what is counted is what is held."""
        is_view = value.untyped_storage().nbytes() != value.nbytes
        super().put(key, value.clone() if is_view and value.nbytes <= self.max_bytes else value)
