"""Running a text model's decoder layers with our own cache: transformers' modules as they are.

hippo.models.fused holds the faster equivalent for Qwen2-style layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from hippo.models.attention import ATTENTION_NAME, AttentionPlan, register_attention


class DecoderStack(Protocol):
    """The decoder layers of one text model, and what stands before and after them."""

    @property
    def num_layers(self) -> int:
        """Decoder layers in all."""

    @property
    def prepares_rows(self) -> bool:
        """Whether each number of rows costs more the first time (hippo.models.linear)."""

    def rotary(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotary factors ``[rows, ...]`` of ``positions`` (int64 ``[num_axes, rows]``), in this
        stack's own form."""

    def run(
        self,
        hidden: torch.Tensor,
        rotary: torch.Tensor,
        step: AttentionPlan,
        first_layer: int,
        last_layer: int,
    ) -> torch.Tensor:
        """Runs layers ``first_layer:last_layer`` on ``hidden`` ``[rows, hidden_size]``; gives as
        many rows, or the last one if ``step.wants_last_row``, which only one layer may be run
        with."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: float32 ``[rows, num_token_ids]``."""


def rotary_tables(
    module: Any, reference: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[rows, head_dim]`` of ``positions`` by a model's own rotary module.

    ``positions`` is int64 ``[num_axes, rows]``; with several axes the module mixes them.
    ``reference`` has the dtype and device of the result.
    """
    batched = positions if positions.shape[0] == 1 else positions[:, None]
    cosines, sines = module(reference, batched)
    return cosines[0], sines[0]


class TransformersStack:
    """Decoder layers run as transformers wrote them, with our registered attention."""

    prepares_rows = False

    def __init__(self, text_model: Any, head: Any, num_token_ids: int) -> None:
        register_attention()
        text_model.config._attn_implementation = ATTENTION_NAME  # the text model's own config
        self._text_model = text_model
        self._head_weight = head.weight[:num_token_ids]

    @property
    def num_layers(self) -> int:
        """Decoder layers in all."""
        return len(self._text_model.layers)

    def rotary(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosines and sines by the model's own rotary module: ``[rows, 2, head_dim]``."""
        return torch.stack(
            rotary_tables(self._text_model.rotary_emb, self._head_weight, positions), 1
        )

    def run(
        self,
        hidden: torch.Tensor,
        rotary: torch.Tensor,
        step: AttentionPlan,
        first_layer: int,
        last_layer: int,
    ) -> torch.Tensor:
        """See DecoderStack.run; transformers' layers compute all rows."""
        num_wanted = 1 if step.wants_last_row else hidden.shape[0]
        step = replace(step, wants_last_row=False)
        batched = hidden[None]
        embeddings = (rotary[None, :, 0], rotary[None, :, 1])
        for layer in self._text_model.layers[first_layer:last_layer]:
            batched = layer(batched, position_embeddings=embeddings, attention_mask=None, step=step)
        return batched[0, -num_wanted:]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: float32 ``[rows, num_token_ids]``."""
        hidden = self._text_model.norm(hidden)
        return torch.nn.functional.linear(hidden, self._head_weight).float()
