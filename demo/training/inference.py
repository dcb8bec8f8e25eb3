"""Batched greedy answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from demo.training.batches import Encoder, pack
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
    tokenizer: "PreTrainedTokenizerBase"
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
    return Loaded(model.eval(), tokenizer, Encoder(tokenizer, special_ids(tokenizer)))


def grid_of(frames: npt.NDArray[np.uint8]) -> tuple[int, int, int]:
    """Returns the merged tokens along time, height and width of clips of this shape."""
    _, count, height, width, _ = frames.shape
    return count // 2, height // 28, width // 28


@torch.no_grad()
def greedy(
    loaded: Loaded, asked: Asked, *, max_new_tokens: int = 260, is_video_first: bool = True
) -> list[list[int]]:
    """Returns greedy answers without end tokens. All prompts must have the same length."""
    inner: Any = loaded.model
    encoder, special = loaded.encoder, loaded.encoder.special
    grid = grid_of(asked.frames)
    rows = [
        encoder.conversation(
            [Exchange("", question, "")], grid=grid, is_video_first=is_video_first, open_end=True
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
    answers: list[list[int]] = [[] for _ in rows]
    running = [True] * len(rows)
    cache: Any = None
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
