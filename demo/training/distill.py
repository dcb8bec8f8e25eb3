"""Distils the draft on the target's greedy answers and its distributions along them."""

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from demo.training import language, loop
from demo.training.batches import (
    Batch,
    Encoder,
    Recipe,
    answered_rows,
    clip_times,
    keep_some,
    pack,
    sample_batch,
    sample_scene,
)
from demo.training.fast import language_hidden
from demo.training.inference import Asked, Loaded, greedy
from demo.training.language import answer_logits, embed
from demo.training.optim import Optimizers, schedule
from demo.world import pixels, texts
from demo.world import scenes as world
from demo.world.sizes import Size

TOP = 8  # likeliest next tokens of the target that are kept per position
SOURCE = Recipe("outputs", language.SIZED_DROPPED.sizes, tokens=7000, stream=9)
FRESH = Recipe(
    "fresh",
    language.SIZED_DROPPED.sizes,
    tokens=5000,
    drop_share=0.5,
    blind_share=0.02,
    talk_share=0.03,
    stream=10,
)


@dataclass(frozen=True, slots=True)
class Outputs:
    """A batch of the target's answers: index of the scenes, questions, and likeliest tokens.

    top_ids and top_log_probs are in the order of the batch's answer tokens, end tokens included.
    """

    index: int
    questions: list[str]
    is_video_first: bool
    answers: list[list[int]]
    top_ids: torch.Tensor  # int16 [num_answer_tokens, TOP]
    top_log_probs: torch.Tensor  # float16 [num_answer_tokens, TOP]


def source_clips(
    seed: int, index: int, tokens: int
) -> tuple[Size, npt.NDArray[np.uint8], list[world.Scene]]:
    """Returns size, frames and scenes of a batch of clips, a pure function of the arguments."""
    rng = np.random.default_rng((seed, SOURCE.stream, index))
    shares = np.array([size.share for size in SOURCE.sizes])
    size = SOURCE.sizes[int(rng.choice(len(shares), p=shares / shares.sum()))]
    count = int(np.clip(tokens // (size.num_visual + 50), 4, 40))
    scenes = [sample_scene(SOURCE, size, rng) for _ in range(count)]
    clips = [pixels.augment(world.render(scene, clip_times(size, rng)), rng) for scene in scenes]
    return size, np.stack(clips), scenes


def write_outputs(target: Loaded, folder: Path, *, num_batches: int, seed: int) -> None:
    """Write the target's greedy answers, one wording per batch, to `outputs.pt`; resumes."""
    path = folder / "outputs.pt"
    done = read_outputs(path) if path.exists() else []
    for index in tqdm(
        range(len(done), num_batches), initial=len(done), total=num_batches, desc="outputs"
    ):
        done.append(_ask_target(target, seed, index))
        if (index + 1) % 5 == 0 or index + 1 == num_batches:
            loop.save_state(path, {"outputs": list(map(astuple, done))})
    (folder / "outputs.done").write_text(f"{num_batches} batches\n")


def read_outputs(path: Path) -> list[Outputs]:
    """Returns what `write_outputs` has written."""
    return [Outputs(*each) for each in torch.load(path, weights_only=True)["outputs"]]


def _ask_target(target: Loaded, seed: int, index: int) -> Outputs:
    rng = np.random.default_rng((seed, SOURCE.stream + 100, index))
    size, frames, scenes = source_clips(seed, index, SOURCE.tokens)
    style = int(rng.choice([0, 0, 0, 1, 2]))
    wording = texts.descriptions(scenes[0], rng)[style].question
    questions = [wording] * len(scenes)
    is_video_first = bool(rng.random() < 0.6)
    answers = greedy(target, Asked(frames, questions), is_video_first=is_video_first)
    batch = _as_batch(target.encoder, size, frames, questions, answers, is_video_first)
    with torch.no_grad():
        logits, _ = answer_logits(target.model, batch, target.encoder.special.video_pad)
    top = functional.log_softmax(logits.float()[:, : len(target.tokenizer)], dim=-1).topk(TOP)
    return Outputs(
        index,
        questions,
        is_video_first,
        answers,
        top.indices.to(torch.int16),
        top.values.to(torch.float16),
    )


def _as_batch(
    encoder: Encoder,
    size: Size,
    frames: npt.NDArray[np.uint8],
    questions: list[str],
    answers: list[list[int]],
    is_video_first: bool,
) -> Batch:
    rows = answered_rows(encoder, questions, answers, grid=size.grid, is_video_first=is_video_first)
    return Batch(size, frames, pack(rows, size.grid, encoder.special), None)


def train_draft(
    model: nn.Module, encoder: Encoder, folder: Path, *, num_steps: int, seed: int
) -> None:
    """Distil the draft in place: three of four steps on the target's outputs, one on fresh clips.

    Half of the steps drop 0 to 95 % of the visual tokens at random and keep original positions.
    """
    inner: Any = model
    inner.model.visual.requires_grad_(False)
    outputs = read_outputs(folder / "outputs.pt")
    optimizers = Optimizers(
        inner.model.language_model.named_parameters(), matrix_lr=1.5e-3, other_lr=1e-3
    )

    def step(index: int) -> dict[str, float]:
        rng = np.random.default_rng((seed, 11, index))
        if index % 4 == 3:
            batch = sample_batch(FRESH, encoder, seed, index)
            logits, truth = answer_logits(model, batch, encoder.special.video_pad)
            loss = functional.cross_entropy(logits.float(), truth)
        else:
            chosen = outputs[int(rng.integers(len(outputs)))]
            logits, truth, loss = _distilled_loss(model, encoder, chosen, seed, rng)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step(schedule(index, num_steps, warmup=30, decay_share=0.5))
        return {
            "loss": float(loss.detach()),
            "right": float((logits.argmax(-1) == truth).float().mean()),
        }

    parts: dict[str, loop.Stateful] = {"model": model, "optimizers": optimizers}
    loop.run_steps("draft", folder, num_steps=num_steps, parts=parts, step=step)


def _distilled_loss(
    model: nn.Module, encoder: Encoder, chosen: Outputs, seed: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inner: Any = model
    size, frames, _ = source_clips(seed, chosen.index, SOURCE.tokens)
    batch = _as_batch(
        encoder, size, frames, chosen.questions, chosen.answers, chosen.is_video_first
    )
    pad = encoder.special.video_pad
    if rng.random() < 0.5:
        kept = max(1, round(size.num_visual * float(1 - rng.uniform(0.0, 0.95))))
        batch = Batch(size, frames, batch.sequences, keep_some(batch.sequences, kept, pad, rng))
    embeds, positions, labels = embed(model, batch, pad)
    hidden = language_hidden(inner.model.language_model, embeds, positions)
    is_answer = labels >= 0
    logits = functional.linear(hidden[is_answer], inner.lm_head.weight.to(hidden.dtype)).float()
    own = functional.log_softmax(logits, dim=-1).gather(1, chosen.top_ids.long())
    theirs = chosen.top_log_probs.float()
    truth = labels[is_answer]
    soft = -(theirs.exp() * own).sum(-1).mean()
    return logits, truth, soft + 0.3 * functional.cross_entropy(logits, truth)
