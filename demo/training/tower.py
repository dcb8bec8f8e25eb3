"""Stage one: trains the vision tower alone, with a dense loss on the content of each patch.

A linear probe on each merged token classifies the object under each of its four patches (colour in
both frames of the pair, shape, size, direction, event state, home cell) and the background.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.training import loop
from demo.training.fast import tower_features
from demo.training.optim import Optimizers, schedule
from demo.world import pixels
from demo.world import scenes as world

# Names and numbers of classes; class 0 of the object heads is "no object".
HEADS = (
    ("colour", 1 + len(world.COLOURS)),
    ("later_colour", 1 + len(world.COLOURS)),
    ("shape", 1 + len(world.SHAPES)),
    ("size", 1 + len(world.SIZES)),
    ("motion", 1 + len(world.MOTIONS)),
    ("state", 1 + 4),  # steady, appearing, vanishing, turning
    ("cell", 1 + world.NUM_CELLS),
    ("tone", len(world.TONES)),
    ("texture", len(world.TEXTURES)),
)
NUM_OBJECT_HEADS = 7
NUM_OUTPUTS = sum(classes for _, classes in HEADS)
FRAME_SIZES = (
    (112, 112), (112, 112), (112, 112), (140, 140), (112, 168), (168, 112), (168, 168), (224, 224),
)  # fmt: skip
WIDER_SIZES = (*FRAME_SIZES[2:], (280, 280), (336, 336), (336, 336), (336, 336))
IGNORE = -100


@dataclass(frozen=True, slots=True)
class TowerBatch:
    """Frame pairs with the labels of each patch, in the order of the patches."""

    frames: npt.NDArray[np.uint8]  # [num_pairs, 2, height, width, 3]
    labels: npt.NDArray[np.int64]  # [num_pairs, patches, len(HEADS)]


class Probe(nn.Module):
    """The linear classifier of the dense loss; used in this stage only."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.read = nn.Linear(hidden_size, pixels.MERGE**2 * NUM_OUTPUTS)

    def forward(self, features: Tensor) -> Tensor:
        """Returns logits [num_pairs, patches, NUM_OUTPUTS] of [num_pairs, tokens, hidden]."""
        num_pairs, tokens, _ = features.shape
        out: Tensor = self.read(features).float()
        return out.view(num_pairs, tokens * pixels.MERGE**2, NUM_OUTPUTS)


def sample_batch(
    seed: int,
    index: int,
    patches: int = 6400,
    sizes: Sequence[tuple[int, int]] = FRAME_SIZES,
    stream: int = 1,
) -> TowerBatch:
    """Returns the batch of an index, a pure function of the arguments."""
    rng = np.random.default_rng((seed, stream, index))
    height, width = sizes[int(rng.integers(len(sizes)))]
    num_pairs = max(8, patches // ((height // pixels.PATCH) * (width // pixels.PATCH)))
    all_frames: list[npt.NDArray[np.uint8]] = []
    all_labels: list[npt.NDArray[np.int64]] = []
    while len(all_frames) < num_pairs:
        duration_s = float(rng.choice([4.0, 6.0, 8.0]))
        most = 6 if height * width < 150 * 150 else 8
        scene = world.sample_scene(
            rng, height=height, width=width, duration_s=duration_s, min_objects=2, max_objects=most
        )
        starts = rng.permutation(int(duration_s))[:2].astype(np.float64)
        jitter = rng.uniform(0, 0.06)
        times_s = np.concatenate([[start + jitter, start + 0.5 + jitter] for start in starts])
        frames, ids = world.render_with_ids(scene, times_s)
        assert ids is not None
        frames = pixels.augment(frames, rng)
        for pair in range(len(starts)):
            both = slice(2 * pair, 2 * pair + 2)
            all_frames.append(frames[both])
            all_labels.append(pair_labels(scene, ids[both], times_s[both]))
    return TowerBatch(np.stack(all_frames), np.stack(all_labels))


def pair_labels(
    scene: world.Scene, ids: npt.NDArray[np.int8], times_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Returns the labels of each patch of a frame pair, [patches, len(HEADS)].

    ids: [2, height, width], the object at each pixel.
    """
    rows, cols = scene.height // pixels.PATCH, scene.width // pixels.PATCH
    blocks = ids.reshape(2, rows // 2, 2, pixels.PATCH, cols // 2, 2, pixels.PATCH)
    # [patches, pixels of both frames]
    blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * cols, -1)
    count = len(scene.objects)
    # A row per object, then "none", then "unclear".
    table = np.zeros((count + 2, len(HEADS)), np.int64)
    table[count + 1, :NUM_OBJECT_HEADS] = IGNORE
    for index, item in enumerate(scene.objects):
        table[index, :NUM_OBJECT_HEADS] = 1 + np.array(_object_state(item, times_s))
    table[:, NUM_OBJECT_HEADS] = scene.tone
    table[:, NUM_OBJECT_HEADS + 1] = scene.texture
    if not count:
        return table[np.zeros(rows * cols, np.int64)]
    cover = np.stack([(blocks == index).sum(axis=1) for index in range(count)], axis=1)
    most = cover.max(axis=1)
    who = np.where(most > 60, cover.argmax(axis=1), np.where(most < 24, count, count + 1))
    return table[who]


def _object_state(item: world.SceneObject, times_s: npt.NDArray[np.float64]) -> tuple[int, ...]:
    change = item.change_at(times_s)
    changing = bool(change[1] - change[0] > 0.12)
    state = item.event if changing else 0  # EVENTS shares the order: none, appears, vanishes, turns
    first, second = item.colour, item.colour
    if world.EVENTS[item.event] == "turns":
        first = item.new_colour if not changing and change.mean() > 0.5 else item.colour
        second = item.new_colour if changing or change.mean() > 0.5 else item.colour
    return first, second, item.shape, item.size, item.motion, state, item.cell


def dense_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Returns the summed loss of the heads, and each head's accuracy on patches with an object.

    logits: [num_pairs, patches, NUM_OUTPUTS]; labels: [num_pairs, patches, len(HEADS)].
    """
    total = logits.new_zeros(())
    accuracy = {}
    start = 0
    occupied = labels[..., 0] > 0
    weight = torch.where(occupied, 1.0, 0.25)
    for head, (name, classes) in enumerate(HEADS):
        part, truth = logits[..., start : start + classes], labels[..., head]
        start += classes
        losses = functional.cross_entropy(
            part.reshape(-1, classes), truth.reshape(-1), reduction="none"
        )
        known = truth != IGNORE
        if head < NUM_OBJECT_HEADS:
            total = total + (losses * (weight * known).reshape(-1)).sum() / (weight * known).sum()
            right = (part.argmax(-1) == truth)[occupied]
        else:
            total = total + 0.2 * losses.mean()
            right = part.argmax(-1) == truth
        accuracy[name] = float(right.float().mean())
    return total, accuracy


def tower_logits(visual: nn.Module, probe: Probe, frames: Tensor) -> Tensor:
    """Returns probe logits of frame pairs, uint8 [num_pairs, 2, height, width, 3]."""
    rows, cols = frames.shape[2] // pixels.PATCH, frames.shape[3] // pixels.PATCH
    patches = pixels.patchify(frames)[:, 0]  # [num_pairs, rows * cols, 1176]
    logits: Tensor = probe(tower_features(visual, patches, rows, cols))
    return logits


def train_tower(
    visual: nn.Module,
    probe: Probe,
    folder: Path,
    name: str,
    draw: Callable[[int], TowerBatch],
    *,
    num_steps: int,
    rate: float,
    render_core: int | None = None,
) -> None:
    """Trains a tower and its probe in place on the batches that `draw` makes in another process;
    saves state and figures in `folder` as `name`."""
    modules = {"visual": visual, "probe": probe}
    named = [
        (f"{part}.{key}", value)
        for part, module in modules.items()
        for key, value in module.named_parameters()
    ]
    optimizers = Optimizers(named, matrix_lr=rate, other_lr=rate)
    batches: Iterator[TowerBatch] | None = None

    def step(index: int) -> dict[str, float]:
        nonlocal batches
        if batches is None:
            batches = loop.prefetched(draw, index, num_steps, render_core)
        batch = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = tower_logits(visual, probe, torch.from_numpy(batch.frames))
        loss, figures = dense_loss(logits, torch.from_numpy(batch.labels))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step(schedule(index, num_steps, decay_share=0.35))
        return {"loss": float(loss.detach()), **figures}

    parts: dict[str, loop.Stateful] = {**modules, "optimizers": optimizers}
    loop.run_steps(name, folder, num_steps=num_steps, parts=parts, step=step)
