"""Scores of a prompt's visual tokens by transformers' own layers."""

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hippo.models.interface.base import Prompt


def reference_scores(
    model: Any, inputs: Any, prompt: Prompt, *, num_layers: int, scope: str
) -> torch.Tensor:
    """Scores of the layers with attention among the first ``num_layers``, ``[number of them,
    num_visual_tokens]``.

    ``model`` is transformers' with layers of Qwen2, Qwen3 or Qwen3.5; ``inputs`` are its
    processor's for ``prompt``. Every layer's whole ``[heads, length, length]`` product is computed,
    head by head.
    """
    layers = model.model.language_model.layers
    attentions = [layer.self_attn for layer in layers[:num_layers] if hasattr(layer, "self_attn")]
    is_gated = attentions[0].q_proj.out_features == 2 * attentions[0].o_proj.in_features
    kind = "qwen3_5" if is_gated else "qwen2"
    qwen: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    scores = []
    for attention, (_, given) in zip(attentions, _calls(model, inputs, attentions), strict=True):
        hidden, (cosines, sines) = given["hidden_states"], given["position_embeddings"]
        heads = (*hidden.shape[:-1], -1, attention.head_dim)
        with torch.no_grad():
            query, key = attention.q_proj(hidden), attention.k_proj(hidden).view(heads)
            if is_gated:  # head by head a query and a gate
                query = query.view(*heads[:-1], 2, attention.head_dim)[..., 0, :]
            query = query.reshape(heads)
            if hasattr(attention, "q_norm"):
                query, key = attention.q_norm(query), attention.k_norm(key)
            query, key = query.transpose(1, 2), key.transpose(1, 2)
            query, key = qwen.apply_rotary_pos_emb(query, key, cosines, sines)
            key = qwen.repeat_kv(key, attention.num_key_value_groups)
            logits = (query[0] @ key[0].transpose(-1, -2)) * attention.scaling  # [heads, n, n]
        asked = logits[:, prompt.question_indices]
        if scope == "causal":  # as the model attends: all text behind the videos
            length = prompt.length
            logits += torch.full((length, length), -torch.inf).triu(1)
            asked = logits[:, text_behind(prompt)]
        if scope == "visual":
            weights = asked[:, :, prompt.visual_indices].softmax(-1)
        else:
            weights = asked.softmax(-1)[:, :, prompt.visual_indices]
        scores.append(weights.mean((0, 1)))
    return torch.stack(scores)


def _calls(model: Any, inputs: Any, modules: Sequence[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The arguments of the modules in a forward."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def keep(_module: Any, args: Any, given: dict[str, Any]) -> None:
        calls.append((args, given))

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        model.model.rope_deltas = None
        with torch.no_grad():
            model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def text_behind(prompt: Prompt) -> list[int]:
    """The places of the text behind the last video, one by one."""
    visual = {*prompt.visual_indices.tolist(), *prompt.other_indices.tolist()}
    last = int(prompt.visual_indices[-1])
    return [place for place in range(last + 1, prompt.length) if place not in visual]


def reference_alignment(
    model: Any, inputs: Any, prompt: Prompt, *, num_layers: int
) -> torch.Tensor:
    """ParallelVLM's UV-Prune, as its formula reads: the change of each cosine between a visual
    token's and a question token's hidden state, from layer to layer, summed over the first
    ``num_layers`` layers; the mean over the question. ``[num_visual_tokens]``."""
    calls = _calls(model, inputs, model.model.language_model.layers[: num_layers + 1])
    states = [(args[0] if args else given["hidden_states"])[0] for args, given in calls]
    assert len(states) == num_layers + 1
    cosines = [
        torch.nn.functional.cosine_similarity(
            state[prompt.visual_indices, None], state[None, prompt.question_indices], dim=-1
        )
        for state in states
    ]
    changes = [after - before for before, after in itertools.pairwise(cosines)]
    return torch.stack(changes).sum(0).mean(1)
