"""Makes a trained model deeper without changing its function.

New layers add nothing at first, because their projections to the residual stream are zero; further
training changes them.
"""

from typing import TYPE_CHECKING, Any

import torch

from demo.training import models

if TYPE_CHECKING:
    from torch import nn


def depth_map(old: int, new: int) -> list[int | None]:
    """Returns for each layer of the deeper model its old layer, or None for a new layer.

    The old layers keep their order, and new layers follow each of them.
    """
    bounds = [round(index * new / old) for index in range(old + 1)]
    places: list[int | None] = [None] * new
    for index in range(old):
        places[bounds[index]] = index
    return places


def grow(model: "nn.Module", shape: models.DemoShape, ids: models.SpecialIds) -> "nn.Module":
    """Returns a deeper model with equal outputs; torch's global generator fills new layers."""
    old: Any = model
    deep: Any = models.build(shape, ids)
    source, goal = old.state_dict(), deep.state_dict()
    prefix = "model.language_model.layers."
    for name, value in source.items():
        if not name.startswith(prefix):
            goal[name] = value
    places = depth_map(len(old.model.language_model.layers), shape.num_layers)
    for index, origin in enumerate(places):
        for name in [name for name in goal if name.startswith(f"{prefix}{index}.")]:
            tail = name.removeprefix(f"{prefix}{index}.")
            if origin is not None:
                goal[name] = source[f"{prefix}{origin}.{tail}"]
            elif tail in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                goal[name] = torch.zeros_like(goal[name])
    deep.load_state_dict(goal)
    grown: nn.Module = deep
    return grown
