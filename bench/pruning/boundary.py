"""Position bias: how many kept tokens lie at a boundary, against how many there are at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Grid = tuple[int, int, int]  # frames, rows, columns


@dataclass(frozen=True, slots=True)
class BoundaryShares:
    """Two readings of "boundary": each share kept, and the share present in the whole video."""

    ring_kept: float
    ring_present: float
    ends_kept: float
    ends_present: float

    @property
    def ring_ratio(self) -> float:
        """Share kept over share present on the outer ring of each frame's grid."""
        return self.ring_kept / self.ring_present

    @property
    def ends_ratio(self) -> float:
        """Share kept over share present in the first and last tenth of the sequence."""
        return self.ends_kept / self.ends_present


def ring_mask(grids: Sequence[Grid]) -> torch.Tensor:
    """Which visual tokens lie on the outer ring of their frame: bool ``[num_visual_tokens]``."""
    masks = []
    for frames, rows, columns in grids:
        mask = torch.ones(frames, rows, columns, dtype=torch.bool)
        mask[:, 1:-1, 1:-1] = False
        masks.append(mask.reshape(-1))
    return torch.cat(masks)


def ends_mask(num_visual_tokens: int) -> torch.Tensor:
    """Which visual tokens are in the first or last tenth of the sequence: bool, as above."""
    tenth = num_visual_tokens // 10
    mask = torch.zeros(num_visual_tokens, dtype=torch.bool)
    mask[:tenth] = True
    mask[num_visual_tokens - tenth :] = True
    return mask


def boundary_shares(kept: torch.Tensor, grids: Sequence[Grid]) -> BoundaryShares:
    """Both readings for kept indices; ValueError when nothing is kept."""
    if kept.numel() == 0:
        raise ValueError("no token is kept, so there are no shares")
    ring = ring_mask(grids)
    ends = ends_mask(ring.shape[0])
    return BoundaryShares(
        ring_kept=float(ring[kept].float().mean()),
        ring_present=float(ring.float().mean()),
        ends_kept=float(ends[kept].float().mean()),
        ends_present=float(ends.float().mean()),
    )
