"""Attention of a prompt's question to its visual tokens, by transformers' own layers."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from hippo.models.base import Prompt


def reference_scores(
    model: Any, inputs: Any, prompt: Prompt, *, num_layers: int, scope: str
) -> torch.Tensor:
    """Scores of the first ``num_layers`` layers, ``[num_layers, num_visual_tokens]``.

    ``model`` is transformers' with layers of Qwen2 or Qwen3; ``inputs`` are its processor's for
    ``prompt``. Every layer's whole ``[heads, length, length]`` product is computed, head by head.
    """
    qwen2: Any = importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    layers = model.model.language_model.layers
    seen: list[tuple[torch.Tensor, Any]] = []

    def keep(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        seen.append((kwargs["hidden_states"], kwargs["position_embeddings"]))

    hooks = [
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
        for layer in layers[:num_layers]
    ]
    try:
        model.model.rope_deltas = None
        with torch.no_grad():
            model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    scores = []
    for layer, (hidden, (cosines, sines)) in zip(layers, seen, strict=False):
        attention = layer.self_attn
        heads = (*hidden.shape[:-1], -1, attention.head_dim)
        with torch.no_grad():
            query, key = attention.q_proj(hidden).view(heads), attention.k_proj(hidden).view(heads)
            if hasattr(attention, "q_norm"):
                query, key = attention.q_norm(query), attention.k_norm(key)
            query, key = query.transpose(1, 2), key.transpose(1, 2)
            query, key = qwen2.apply_rotary_pos_emb(query, key, cosines, sines)
            key = qwen2.repeat_kv(key, attention.num_key_value_groups)
            logits = (query[0] @ key[0].transpose(-1, -2)) * attention.scaling  # [heads, n, n]
        asked = logits[:, prompt.question_indices]
        if scope == "visual":
            weights = asked[:, :, prompt.visual_indices].softmax(-1)
        else:
            weights = asked.softmax(-1)[:, :, prompt.visual_indices]
        scores.append(weights.mean((0, 1)))
    return torch.stack(scores)
