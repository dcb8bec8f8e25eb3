"""Drafts that are weaker than the bundled one, made from it in a second.

Noise on the weights of its layers makes the bundled draft agree with the target on fewer tokens.
As with a draft that learned less, its errors come at the tokens of which it is least sure. Pruned
visual tokens make the task harder, so long prompts reach the same agreement with less noise.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.base.clips import Kind
from hippo.cli.stack import BUNDLED_PAIR
from tests.support.models.random_draft import write_random_draft

# Size of the noise, as a share of the root mean square of each matrix. `python -m
# bench.drafts.agreement --draft-model 93%` prints the agreement on 20 held-out clips.
_NOISE: Mapping[str, Mapping[Kind, float]] = {
    "93%": {"short": 0.76, "long": 0.71},
    "85%": {"short": 0.87, "long": 0.84},
    "75%": {"short": 0.95, "long": 0.92},
}
BUNDLED = "bundled"
_NAMES = (BUNDLED, *_NOISE, "random")
HELP = f"a folder, or one of {', '.join(_NAMES)}".replace("%", "%%")


def find_draft(name: str, folder: Path, kind: Kind) -> str:
    """Returns the folder of a draft, which is ``name`` itself or one of the drafts of ``HELP``;
    weaker drafts than the bundled one are written into ``folder``."""
    if name == BUNDLED:
        return str(BUNDLED_PAIR / "draft")
    if name not in _NAMES:
        return name
    path = folder / f"draft-{kind}-{name.removesuffix('%')}"
    if name == "random":
        return str(write_random_draft(BUNDLED_PAIR / "draft", path))
    return str(_write_noisy_draft(path, _NOISE[name][kind]))


def _write_noisy_draft(folder: Path, noise: float) -> Path:
    bundled = BUNDLED_PAIR / "draft"
    shutil.copytree(bundled, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(0)
    weights = load_file(bundled / "model.safetensors")
    for name, weight in sorted(weights.items()):
        if name.startswith("model.layers.") and weight.dim() == 2:
            exact = weight.float()
            scale = noise * exact.square().mean().sqrt()
            exact += scale * torch.randn(exact.shape, generator=generator)
            weights[name] = exact.to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
