"""Batched greedy answers, and a model's greedy tokens along given answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from demo.training.batches import Encoder, IntArray, answered_rows, keep_some, pack
from demo.training.fast import language_hidden
from demo.training.language import visual_features, with_features
from demo.training.tokenizer import special_ids
from demo.world.texts import Exchange
from hippo.models.loading._torchvision import ensure_torchvision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer and encoder."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder


@dataclass(frozen=True, slots=True)
class Asked:
    """Clips of equal size with one question each."""

    frames: npt.NDArray[np.uint8]  # [batch, num_frames, height, width, 3]
    questions: Sequence[str]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Loaded:
    """Loads a checkpoint folder with transformers."""
    ensure_torchvision()
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForImageTextToText.from_pretrained(str(folder), dtype=dtype)
    is_timed = model.config.model_type == "qwen3_vl"
    encoder = Encoder(tokenizer, special_ids(tokenizer), is_timed=is_timed)
    return Loaded(model.eval(), tokenizer, encoder)


def grid_of(frames: npt.NDArray[np.uint8]) -> tuple[int, int, int]:
    """Returns the merged tokens along time, height and width of clips of this shape."""
    _, count, height, width, _ = frames.shape
    return count // 2, height // 28, width // 28


@torch.no_grad()
def greedy(
    loaded: Loaded,
    asked: Asked,
    *,
    max_new_tokens: int = 260,
    is_video_first: bool = True,
    keep: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Returns greedy answers without end tokens. All prompts must have the same length.

    keep: the number of visual tokens that the model sees, drawn at random (default: all).
    """
    inner: Any = loaded.model
    encoder, special = loaded.encoder, loaded.encoder.special
    grid = grid_of(asked.frames)
    rows = [
        encoder.conversation(
            [Exchange("", question, "")],
            grid=grid,
            is_video_first=is_video_first,
            open_end=True,
        )
        for question in asked.questions
    ]
    length = len(rows[0][0])
    assert all(len(ids) == length for ids, _ in rows)
    sequences = pack(rows, grid, special)
    ids = torch.from_numpy(sequences.ids[:, :length])
    positions = torch.from_numpy(sequences.positions[:, :, :length])
    next_position = positions[:, :, -1].amax(dim=0)
    features = visual_features(inner.model.visual, torch.from_numpy(asked.frames))
    language = inner.model.language_model
    embeds = with_features(language, ids, features, special.video_pad)
    is_visual = ids == special.video_pad
    if keep is not None:
        chosen = keep_some(sequences, keep, special.video_pad, np.random.default_rng(seed))
        select = torch.from_numpy(chosen[:, chosen[0] < length])
        is_visual = is_visual.gather(1, select)
        embeds = embeds.gather(1, select[..., None].expand(-1, -1, embeds.shape[-1]))
        positions = positions.gather(2, select.expand(3, -1, -1))
    answers: list[list[int]] = [[] for _ in rows]
    running = [True] * len(rows)
    cache: Any = None
    embeds, *deep = torch.split(embeds, language.config.hidden_size, dim=-1)
    deepstack = {
        "visual_pos_masks": is_visual,
        "deepstack_visual_embeds": [part[is_visual] for part in deep],
    }
    for _ in range(max_new_tokens):
        mask = torch.ones(
            len(rows), embeds.shape[1] + (cache.get_seq_length() if cache is not None else 0)
        )
        out = language(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=mask.long(),
            cache=cache,
            use_cache=True,
            **(deepstack if deep and cache is None else {}),
        )
        cache = out.past_key_values
        logits = functional.linear(out.last_hidden_state[:, -1], inner.lm_head.weight)
        chosen_ids = logits[:, : len(loaded.tokenizer)].argmax(-1)
        for row, token in enumerate(chosen_ids.tolist()):
            if running[row] and token in (special.im_end, special.end_of_text):
                running[row] = False
            elif running[row]:
                answers[row].append(token)
        if not any(running):
            break
        next_position = next_position + 1
        positions = next_position[None, :, None].expand(3, -1, 1)
        embeds = language.embed_tokens(chosen_ids)[:, None]
    return answers


@torch.no_grad()
def greedy_along(
    loaded: Loaded,
    asked: Asked,
    answers: Sequence[list[int]],
    *,
    is_video_first: bool = True,
    keep: int | None = None,
    seed: int = 0,
) -> list[IntArray]:
    """Returns the model's greedy token after each prefix of each answer, end tokens included.

    keep: the number of visual tokens that the model sees, drawn at random (default: all).
    """
    inner: Any = loaded.model
    encoder, special = loaded.encoder, loaded.encoder.special
    grid = grid_of(asked.frames)
    rows = answered_rows(
        encoder,
        asked.questions,
        answers,
        grid=grid,
        is_video_first=is_video_first,
    )
    sequences = pack(rows, grid, special)
    ids, labels = torch.from_numpy(sequences.ids), torch.from_numpy(sequences.labels)
    positions = torch.from_numpy(sequences.positions)
    features = visual_features(inner.model.visual, torch.from_numpy(asked.frames))
    language = inner.model.language_model
    embeds = with_features(language, ids, features, special.video_pad)
    if keep is not None:
        select = torch.from_numpy(
            keep_some(sequences, keep, special.video_pad, np.random.default_rng(seed))
        )
        embeds = embeds.gather(1, select[..., None].expand(-1, -1, embeds.shape[-1]))
        positions, labels = positions.gather(2, select.expand(3, -1, -1)), labels.gather(1, select)
    hidden = language_hidden(language, embeds, positions)
    said_here = []
    for row in range(len(rows)):
        logits = functional.linear(hidden[row][labels[row] >= 0], inner.lm_head.weight)
        said_here.append(logits[:, : len(loaded.tokenizer)].argmax(-1).numpy())
    return said_here
