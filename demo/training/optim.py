"""Optimizers for training: Muon for matrices, AdamW for other parameters, one schedule."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Optimizers:
    """The two optimizers of one training stage as one object; its only state is theirs."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], *, matrix_lr: float, other_lr: float
    ) -> None:
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in named:
            is_matrix = parameter.ndim == 2 and "embed_tokens" not in name and "read" not in name
            (matrices if is_matrix else others).append(parameter)
        self.muon = torch.optim.Muon(
            matrices, lr=matrix_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw", ns_steps=5
        )
        self.adamw = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.peaks = (matrix_lr, other_lr)
        self.parameters = matrices + others

    def step(self, factor: float) -> None:
        """Updates the parameters at `factor` times the peak rates; clips and clears gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, peak in zip((self.muon, self.adamw), self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


def schedule(
    step: int, num_steps: int, *, warmup: int = 60, decay_share: float = 0.35, final: float = 0.03
) -> float:
    """Returns the share of the peak rate at a step: linear warm-up, constant, linear decay."""
    if step < warmup:
        return (step + 1) / warmup
    decay_from = int(num_steps * (1 - decay_share))
    if step < decay_from:
        return 1.0
    part = (step - decay_from) / max(1, num_steps - decay_from)
    return 1.0 - (1.0 - final) * min(part, 1.0)
