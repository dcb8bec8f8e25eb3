"""Trains a language model on top of the frozen tower."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.training import loop
from demo.training.batches import IGNORE, Batch, Encoder, Recipe, sample_batch
from demo.training.fast import language_hidden, tower_features
from demo.training.optim import Optimizers, schedule
from demo.world import pixels
from demo.world.sizes import Size

SMALL = (
    Size(112, 112, 8, 0.45, 5),
    Size(140, 140, 8, 0.2, 6),
    Size(112, 168, 8, 0.1, 6),
    Size(168, 112, 8, 0.1, 6),
    Size(168, 168, 6, 0.1, 7),
    Size(140, 140, 12, 0.05, 6),
)
LARGE = (
    Size(168, 168, 12, 0.3, 8),
    Size(224, 224, 8, 0.3, 8),
    Size(224, 224, 16, 0.2, 8),
    Size(336, 336, 16, 0.2, 8),
)
STILLS = Recipe(
    "stills",
    (Size(112, 112, 2, 0.5, 5), Size(140, 140, 2, 0.3, 6), Size(168, 168, 2, 0.2, 7)),
    tokens=5000,
    is_still=True,
    stream=3,
)
CLIPS = Recipe("clips", SMALL, tokens=5000, stream=4)
DROPPED = Recipe("dropped", SMALL, tokens=5000, drop_share=0.4, blind_share=0.02, stream=5)


def _mixed(small_share: float) -> tuple[Size, ...]:
    """Returns small and large sizes, with a share of `small_share` for small ones."""
    return tuple(replace(size, share=size.share * small_share) for size in SMALL) + tuple(
        replace(size, share=size.share * (1 - small_share)) for size in LARGE
    )


SIZED = Recipe("sized", _mixed(0.55), tokens=5000, stream=6)
SIZED_DROPPED = Recipe(
    "sized-dropped", _mixed(0.6), tokens=5000, drop_share=0.6, blind_share=0.02, stream=7
)
SETTLED = Recipe("settled", _mixed(0.5), tokens=5000, talk_share=0.02, stream=13)
GROWN = Recipe("grown", _mixed(0.65), tokens=4000, talk_share=0.03, stream=8)


def visual_features(visual: nn.Module, frames: Tensor) -> Tensor:
    """Returns the visual tokens of clips of equal size, as tower_features does for a frame pair.

    frames: uint8 [batch, num_frames, height, width, 3].
    """
    patches = pixels.patchify(frames)
    batch, pairs, _, _ = patches.shape
    rows, cols = frames.shape[2] // pixels.PATCH, frames.shape[3] // pixels.PATCH
    features = tower_features(visual, patches.flatten(0, 1), rows, cols)
    return features.reshape(batch, pairs * features.shape[1], -1)


def with_features(language: nn.Module, ids: Tensor, features: Tensor, video_pad: int) -> Tensor:
    """Returns input embeddings in the dtype of `features`, [batch, length, hidden]."""
    inner: Any = language
    embeds: Tensor = inner.embed_tokens(ids).to(features.dtype)
    return embeds.masked_scatter((ids == video_pad)[..., None], features)


def embed(
    model: nn.Module, batch: Batch, video_pad: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns input embeddings, positions and labels of the tokens that the model sees.

    Their shapes are [batch, length, hidden], [3, batch, length] and [batch, length].
    """
    inner: Any = model
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        features = visual_features(inner.model.visual, torch.from_numpy(batch.frames))
    sequences = batch.sequences
    ids = torch.from_numpy(sequences.ids)
    labels, positions = torch.from_numpy(sequences.labels), torch.from_numpy(sequences.positions)
    embeds = with_features(inner.model.language_model, ids, features.to(dtype), video_pad)
    if batch.select is not None:
        select = torch.from_numpy(batch.select)
        embeds = embeds.gather(1, select[..., None].expand(-1, -1, embeds.shape[-1]))
        positions = positions.gather(2, select.expand(3, -1, -1))
        labels = labels.gather(1, select)
    return embeds, positions, labels


def answer_logits(
    model: nn.Module, batch: Batch, video_pad: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Returns logits [num_answer_tokens, vocabulary] and true ids of the assistant's tokens."""
    inner: Any = model
    embeds, positions, labels = embed(model, batch, video_pad, dtype)
    hidden = language_hidden(inner.model.language_model, embeds, positions)
    is_answer = labels != IGNORE
    logits: Tensor = functional.linear(hidden[is_answer], inner.lm_head.weight.to(dtype))
    return logits, labels[is_answer]


def train_language(
    model: nn.Module,
    recipes: Sequence[tuple[Recipe, int]],
    encoder: Encoder,
    folder: Path,
    name: str,
    *,
    seed: int = 0,
    matrix_lr: float = 2e-3,
    other_lr: float = 2e-3,
    warmup: int = 60,
    decay_share: float = 0.35,
    save_every: int = 100,
) -> None:
    """Train the language model in place, for each recipe its number of steps; freezes the tower."""
    inner: Any = model
    inner.model.visual.requires_grad_(False)
    optimizers = Optimizers(
        inner.model.language_model.named_parameters(), matrix_lr=matrix_lr, other_lr=other_lr
    )
    num_steps = sum(steps for _, steps in recipes)

    def step(index: int) -> dict[str, float]:
        batch = sample_batch(_recipe_at(recipes, index), encoder, seed, index)
        logits, truth = answer_logits(model, batch, encoder.special.video_pad)
        loss = functional.cross_entropy(logits.float(), truth)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step(schedule(index, num_steps, warmup=warmup, decay_share=decay_share))
        return {
            "loss": float(loss.detach()),
            "right": float((logits.argmax(-1) == truth).float().mean()),
        }

    parts: dict[str, loop.Stateful] = {"model": model, "optimizers": optimizers}
    loop.run_steps(name, folder, num_steps=num_steps, parts=parts, step=step, save_every=save_every)


def _recipe_at(recipes: Sequence[tuple[Recipe, int]], index: int) -> Recipe:
    for recipe, steps in recipes:
        if index < steps:
            return recipe
        index -= steps
    return recipes[-1][0]
