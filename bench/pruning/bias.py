"""Position bias: where in the frames, and in the sequence, the highest scores lie."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bench.pruning.choices import Choice, Layers
from bench.pruning.statistics import Counts, interval
from bench.pruning.traces import ClipTrace
from hippo.pruning.select import SelectionOptions
from hippo.types import PruningStrategy

_RATIO = 0.9  # the published shares are of the top 10 %


def bias_choices(layers: Layers) -> dict[str, Choice]:
    """Returns the choices of the tokens with the highest scores, by the name of the score."""
    num_layers, most_layers = layers.default, layers.most

    def scored(weights: tuple[float, float, float]) -> Choice:
        options = SelectionOptions(weights=weights, spread=0.0)
        return Choice(PruningStrategy.HOLISTIC, _RATIO, num_layers, options=options)

    found = {
        "raw attention, causal, all layers": Choice(
            PruningStrategy.ATTENTION, _RATIO, most_layers, scope="causal"
        ),
        "raw attention, all layers": Choice(PruningStrategy.ATTENTION, _RATIO, most_layers),
        "raw attention": Choice(PruningStrategy.ATTENTION, _RATIO, num_layers),
        "attention, normalised": scored((1.0, 0.0, 0.0)),
        "holistic score": scored((1.0, 1.0, 1.0)),
    }
    if layers.aligned:
        found["change of alignment (uv)"] = Choice(
            PruningStrategy.UV, _RATIO, layers.of(PruningStrategy.UV)
        )
    return found


def boundaries(grids: Sequence[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    """Returns both readings of "boundary", bool ``[num_visual_tokens]``: the outer ring of each
    frame's grid, and the first and last tenth of the sequence."""
    rings = [torch.ones(grid, dtype=torch.bool) for grid in grids]
    for ring in rings:
        ring[:, 1:-1, 1:-1] = False
    ring = torch.cat([ring.flatten() for ring in rings])
    place = 10 * torch.arange(ring.shape[0])
    return {"ring": ring, "ends": (place < ring.shape[0]) | (place >= 9 * ring.shape[0])}


def bias_rows(
    clips: Iterable[ClipTrace], choices: Mapping[str, Choice]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Returns a row per score, and the number of clips of each grid. A row has, for each boundary,
    the share of chosen tokens there, the share of all tokens, and the first over the second, as
    means over samples."""
    found: dict[tuple[str, str], Counts] = {}
    grids: Counter[str] = Counter()
    for clip in clips:
        grids.update({f"{rows} x {columns}" for _, rows, columns in clip.grids})
        masks = boundaries(clip.grids)
        for trace in clip.samples:
            for label, choice in choices.items():
                kept = choice.kept(clip, trace, 0)
                for name, mask in masks.items():
                    share, of_all = float(mask[kept].float().mean()), float(mask.float().mean())
                    values = {"": share, ", all": of_all, ", over all": share / of_all}
                    for reading, value in values.items():
                        counts = found.setdefault((label, name + reading), Counts())
                        counts.add_hits(clip.name, value, 1)
    rows: dict[str, dict[str, Any]] = {label: {"label": label} for label in choices}
    for (label, key), counts in found.items():
        rows[label][key] = interval(counts)
    return list(rows.values()), grids
