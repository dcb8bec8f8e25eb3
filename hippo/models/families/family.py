"""What a model family says of itself: its prompts, its vision tower and its description."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hippo.models.families.pixels import PixelScale
from hippo.models.interface.base import Prompt, VisualItem
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import LoadPlan
from hippo.models.interface.transfer import to_device
from hippo.models.loading.pretrained import Pretrained
from hippo.models.prompts.builder import PromptBuilder
from hippo.types import MediaKind


class VisionTower(ABC):
    """A family's vision tower; the constructor replaces modules of the loaded model in place."""

    def __init__(self, pretrained: Pretrained) -> None:
        self.model: Any = pretrained.model.model
        self._embedding: torch.Tensor = pretrained.model.get_input_embeddings().weight
        processor, device = pretrained.processor, self._embedding.device
        self._scales = {
            MediaKind.VIDEO: PixelScale(processor.video_processor, device),
            MediaKind.IMAGE: PixelScale(processor.image_processor, device),
        }

    @abstractmethod
    def embed_item(self, item: VisualItem) -> Iterator[torch.Tensor]:
        """Computes the features of an item part by part: ``[tokens, width]``, as embed_visual."""

    def embed_others(self, prompt: Prompt) -> Sequence[torch.Tensor]:
        """Returns the visual rows (``[rows, width]`` each) that belong to no item: separators."""
        return ()

    def on_device(self, pixels: torch.Tensor, kind: MediaKind) -> torch.Tensor:
        """Copies pixels to the model's device and normalises them there, in the model's dtype."""
        there = to_device(pixels, self._embedding.device)
        return self._scales[kind].normalise(there).to(self._embedding.dtype)


@dataclass(frozen=True, slots=True)
class Family:
    """The parts that are particular to a model family with a language model of Qwen2's or Qwen3's
    layers.

    ``check_configuration`` raises ModelLoadError for an unsupported checkpoint or plan before the
    weights are read; ``make_tower`` may raise ModelLoadError after that.
    """

    title: str  # for readers
    architecture: str  # name of the class in transformers
    num_axes: int  # axes of a position
    make_prompts: Callable[[Pretrained], PromptBuilder]
    make_tower: Callable[[Pretrained], VisionTower]
    video_tokens: str  # what the tokens of a video are, for readers
    check_configuration: Callable[[Checkpoint, LoadPlan], None] | None = None
