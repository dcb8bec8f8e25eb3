"""Batched forwards through transformers' Qwen2.5-VL modules, for training on a CPU.

They have the same parameters and results as the model's own forward, but no loop over frames, and a
matrix product as patch embedding. All clips of a batch have one size.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn


@lru_cache(maxsize=64)
def _axial_positions(rows: int, cols: int, merge: int) -> Tensor:
    """Returns row and column of each patch in the processor's order, [rows * cols, 2]."""
    row = torch.arange(rows)[:, None].expand(rows, cols)
    col = torch.arange(cols)[None, :].expand(rows, cols)
    ordered = [
        grid.reshape(rows // merge, merge, cols // merge, merge).permute(0, 2, 1, 3).reshape(-1)
        for grid in (row, col)
    ]
    return torch.stack(ordered, dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def tower_features(visual: "nn.Module", patches: Tensor, rows: int, cols: int) -> Tensor:
    """Returns the merged visual tokens of equally sized frame pairs; layers attend within a pair.

    patches: [num_pairs, rows * cols, 1176]; rows, cols: patches per frame side.
    Returns [num_pairs, rows * cols / 4, hidden].
    """
    tower: Any = visual
    num_pairs, per_pair, _ = patches.shape
    weight = tower.patch_embed.proj.weight
    # [num_pairs, per_pair, dim]
    x = functional.linear(patches.to(weight.dtype), weight.flatten(1), tower.patch_embed.proj.bias)
    x = x.to(weight.dtype)
    with torch.autocast("cpu", enabled=False):
        cos, sin = tower.rotary_pos_emb(x, _axial_positions(rows, cols, tower.spatial_merge_size))
    cos, sin = cos.view(1, 1, per_pair, -1), sin.view(1, 1, per_pair, -1)
    for block in tower.blocks:
        attention = block.attn
        heads = attention.num_heads
        qkv = (
            attention.qkv(block.norm1(x))
            .view(num_pairs, per_pair, 3, heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        query, key, value = qkv.unbind(0)  # each [num_pairs, heads, per_pair, head_dim]
        query, key = (
            _rotate(query, cos, sin).to(value.dtype),
            _rotate(key, cos, sin).to(value.dtype),
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        mixed = mixed.transpose(1, 2).reshape(num_pairs, per_pair, -1)
        x = x + attention.proj(mixed)
        x = x + block.mlp(block.norm2(x))
    merged: Tensor = tower.merger(x)
    return merged.view(num_pairs, per_pair // tower.spatial_merge_size**2, -1)


def _norm(x: Tensor, norm: Any) -> Tensor:
    """Returns the RMS normalisation, computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    out: Tensor = (wide * scale).to(x.dtype) * norm.weight.to(x.dtype)
    return out


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention of several query heads to one key head; 3x as fast as torch's kernel on CPUs.

    query: [batch, heads, length, size]; key, value: [batch, length, size];
    bias: [heads * length, length].
    """
    batch, heads, length, size = query.shape
    stacked = query.reshape(batch, heads * length, size)
    mask = bias.expand(batch, heads * length, length)
    scores = torch.baddbmm(mask, stacked, key.transpose(1, 2), alpha=size**-0.5)
    mixed: Tensor = torch.bmm(torch.softmax(scores, dim=-1), value)
    return mixed.view(batch, heads, length, size)


def language_hidden(language_model: "nn.Module", embeds: Tensor, positions: Tensor) -> Tensor:
    """Returns the normalised last hidden states of right-padded sequences, with a causal mask.

    Computes in the dtype of `embeds`; the model must have one key-value head.
    embeds: [batch, length, hidden]; positions: [3, batch, length] (time, row, column), with gaps.
    """
    model: Any = language_model
    dtype = embeds.dtype
    cos, sin = model.rotary_emb(embeds, positions)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [batch, length, 1, head_dim]
    x = embeds
    batch, length, hidden = x.shape
    heads = model.config.num_attention_heads
    bias = torch.full((length, length), -1e9, dtype=dtype).triu(1).repeat(heads, 1)
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        size = attention.head_dim
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight = torch.cat([part.weight for part in parts]).to(dtype)
        shift = torch.cat([part.bias for part in parts]).to(dtype)
        mixed = functional.linear(_norm(x, layer.input_layernorm), weight, shift)
        turned = mixed[..., : hidden + size].reshape(batch, length, heads + 1, size)
        turned = _rotate(turned, cos, sin)
        query, key = turned[:, :, :heads].transpose(1, 2), turned[:, :, heads]
        seen = (
            _attend(query, key, mixed[..., hidden + size :], bias)
            .transpose(1, 2)
            .reshape(batch, length, hidden)
        )
        x = x + functional.linear(seen, attention.o_proj.weight.to(dtype))
        weight = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype)
        gate, up = functional.linear(_norm(x, layer.post_attention_layernorm), weight).chunk(
            2, dim=-1
        )
        x = x + functional.linear(functional.silu(gate) * up, mlp.down_proj.weight.to(dtype))
    return _norm(x, model.norm)
