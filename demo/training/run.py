"""A training run: its folder, and the states of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Run:
    """The folder, seed and settings of a training run."""

    folder: Path
    seed: int
    render_core: int | None

    def state(self, name: str) -> dict[str, Any]:
        """Returns the saved state of a finished stage. Raises SystemExit if it has not run."""
        if not (self.folder / f"{name}.done").exists():
            command = f"python -m demo.train --stages {name}"
            raise SystemExit(f"stage {name!r} has not been run: {command}")
        state: dict[str, Any] = torch.load(self.folder / f"{name}.pt", weights_only=True)
        return state
