"""Batches of examples: which examples make a batch, and their tensors side by side."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch.utils.data import Dataset

from hippo.lab.distill.examples import DraftExample

_JITTER = 0.1  # random share of a length, so that epochs have other batches


def grouped(
    lengths: Sequence[int], most_rows: int, rng: random.Random | None = None
) -> list[list[int]]:
    """Returns batches of examples of about one length, by index; with ``rng`` in a random order.

    A batch has at most ``most_rows`` rows, padding included, or a single example.
    """

    def key(index: int) -> float:
        return lengths[index] * (1 + (_JITTER * rng.random() if rng else 0.0))

    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=key):
        longest = max(longest, lengths[index])
        if batches and (len(batches[-1]) + 1) * longest <= most_rows:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    if rng:
        rng.shuffle(batches)
    return batches


def training_batches(lengths: Sequence[int], most_rows: int, *, seed: int) -> Iterator[list[int]]:
    """Yields the batches of one epoch after another, without end; a function of its arguments."""
    for epoch in itertools.count():
        yield from grouped(lengths, most_rows, random.Random(f"{seed} {epoch}"))


@dataclass(frozen=True, slots=True, eq=False)
class ExampleBatch:
    """Examples as right-padded rows; padding stands behind all that the loss looks at."""

    input_ids: torch.Tensor  # int64 [batch, length]
    positions: torch.Tensor  # int64 [num_axes, batch, length]
    is_visual: torch.Tensor  # bool [batch, length]
    features: torch.Tensor  # [num_visual, width], row after row
    is_asked: torch.Tensor  # bool [batch, length]: rows whose logits give the answer's tokens
    answer_ids: torch.Tensor  # int64 [num_answer_tokens], row after row
    top_ids: torch.Tensor  # int64 [num_answer_tokens, k]
    top_logprobs: torch.Tensor  # float32 [num_answer_tokens, k]

    @classmethod
    def of(cls, examples: Sequence[DraftExample]) -> Self:
        """Returns the examples side by side."""
        length = max(example.input_ids.shape[0] for example in examples)
        shape = (len(examples), length)
        ids = torch.zeros(shape, dtype=torch.int64)
        positions = torch.zeros((examples[0].positions.shape[0], *shape), dtype=torch.int64)
        is_visual = torch.zeros(shape, dtype=torch.bool)
        is_asked = torch.zeros(shape, dtype=torch.bool)
        for row, example in enumerate(examples):
            end = example.input_ids.shape[0]
            ids[row, :end] = example.input_ids
            positions[:, row, :end] = example.positions
            is_visual[row, example.visual_rows] = True
            is_asked[row, end - example.answer_ids.shape[0] : end] = True
        return cls(
            ids,
            positions,
            is_visual,
            torch.cat([example.features for example in examples]),
            is_asked,
            torch.cat([example.answer_ids for example in examples]),
            torch.cat([example.top_ids for example in examples]),
            torch.cat([example.top_logprobs for example in examples]),
        )

    def to(self, device: torch.device) -> "ExampleBatch":
        """Returns the batch on a device."""
        return ExampleBatch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


class ExampleBatches(Dataset[ExampleBatch]):
    """Reads batches from the files of their examples; ``wanted`` has the indices of each."""

    def __init__(self, files: Sequence[Path], wanted: Sequence[Sequence[int]]) -> None:
        self._files = files
        self._wanted = wanted

    def __len__(self) -> int:
        return len(self._wanted)

    def __getitem__(self, index: int) -> ExampleBatch:
        return ExampleBatch.of(
            [DraftExample.load(self._files[each]) for each in self._wanted[index]]
        )
