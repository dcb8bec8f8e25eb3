"""Decoder layers with attention, of fewer, larger operations than transformers' modules.

One product computes query, key and value, another computes gate and up, and the rotary embedding is
a complex multiplication in place. Results equal transformers' up to rounding. The weights
come from the loaded modules, which say what a layer has: its head size, norms of queries and keys,
biases, an MLP or experts. Modules that a quantiser made are fused where
hippo.models.quantized.packed has kernels for them; elsewhere each is called as it is.

    rotate_half pairs dimension i with i + d/2. Here the rows of the query and key weights are
    reordered so that the two are adjacent, which does not change any query-key product:

        transformers   a0 a1 a2 a3 | b0 b1 b2 b3        here   a0 b0 a1 b1 a2 b2 a3 b3

Qwen3.5 rotates only the first dimensions of a head, and multiplies what a head reads by a gate: the
rows of its query weight are queries and gates, head by head. Here all gates follow all queries.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from hippo.models.attention.parts import AttentionPlan, attend
from hippo.models.products.kernels import make_norm, norm_weight
from hippo.models.products.linear import Linear, MakeLinear, is_plain
from hippo.models.quantized.packed import make_packed


class AttentionLayer:
    """One layer with attention and an MLP, from transformers' module."""

    def __init__(
        self,
        layer: Any,
        heads: tuple[int, int],
        make_linear: MakeLinear,
        make_output: MakeLinear,
        *,
        num_rotated: int,
    ) -> None:
        """``heads`` are the numbers of query heads and of key-value heads in ``layer``, of which
        the first ``num_rotated`` dimensions are rotated."""
        attention, mlp = layer.self_attn, layer.mlp
        head_dim = attention.head_dim
        self._num_heads, self._num_kv_heads = heads
        groups = self._num_heads // self._num_kv_heads
        self._head_shape = (-1, self._num_heads + 2 * self._num_kv_heads, head_dim)
        self._pair_shape = (*self._head_shape[:2], head_dim // 2, 2)
        self._query_shape = (-1, self._num_kv_heads, groups, head_dim)
        self._key_value_shape = (-1, 2, self._num_kv_heads, head_dim)
        self._scaling = attention.scaling
        self._input_norm = make_norm(layer.input_layernorm)
        self._post_norm = make_norm(layer.post_attention_layernorm)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        dtype = layer.input_layernorm.weight.dtype
        in_pairs = partial(_adjacent_pairs, head_dim=head_dim, num_rotated=num_rotated)
        # Linear layers beside the attention (hippo.models.runners.delta) go with gates.
        self._is_gated = hasattr(getattr(attention, "config", None), "linear_conv_kernel_dim")
        queries = partial(_gates_last, head_dim=head_dim, in_pairs=in_pairs)
        reorders = (queries if self._is_gated else in_pairs, in_pairs)
        self._qkv = make_product(projections, make_linear, dtype, reorders)
        self._head_norm = _make_head_norm(attention, heads, in_pairs)
        self._output = make_product((attention.o_proj,), make_output, dtype)
        self._mlp = make_mlp(mlp, make_linear, make_output, dtype)

    def __call__(
        self, hidden: torch.Tensor, rotary: torch.Tensor, step: AttentionPlan, index: int
    ) -> torch.Tensor:
        attended = self._attend(hidden, rotary, step, index)
        hidden = attended.add_(hidden[-attended.shape[0] :])  # all rows, or the last one
        return self._mlp(self._post_norm(hidden)).add_(hidden)

    def _attend(
        self, hidden: torch.Tensor, rotary: torch.Tensor, step: AttentionPlan, index: int
    ) -> torch.Tensor:
        """Returns what attention adds to ``hidden``, or to its last row; a method of its own, so
        that no query, key or value is held during the MLP."""
        qkv, gates = self._qkv(self._input_norm(hidden)).to(torch.float32), None
        if self._is_gated:
            width = self._num_heads * self._head_shape[2]
            gates = qkv[:, width : 2 * width]
            qkv = torch.cat((qkv[:, :width], qkv[:, 2 * width :]), 1)
        if self._head_norm is not None:
            self._head_norm(qkv.view(self._head_shape))
        pairs = torch.view_as_complex(qkv.view(self._pair_shape))
        rotated = pairs.narrow(1, 0, self._num_heads + self._num_kv_heads)
        rotated[..., : rotary.shape[-1]].mul_(rotary)
        heads = qkv.to(step.dtype).view(self._head_shape)
        attended = attend(
            heads.narrow(1, 0, self._num_heads).view(self._query_shape),
            heads.narrow(1, self._num_heads, 2 * self._num_kv_heads).view(self._key_value_shape),
            step,
            index,
            self._scaling,
        )
        if gates is not None:
            attended = attended * gates[-attended.shape[0] :].sigmoid()
        return self._output(attended.to(hidden.dtype))


def make_mlp(
    mlp: Any, make_linear: MakeLinear, make_output: MakeLinear, dtype: torch.dtype
) -> Linear:
    """Makes the layer's MLP; a mixture of experts runs as transformers' own module.

    transformers multiplies all chosen experts by torch's grouped product. In bfloat16 on GPUs from
    Hopper on, the host does not wait in it; elsewhere torch reads the groups' sizes back (ATen's
    GroupedBlas.cpp).
    """
    if not hasattr(mlp, "gate_proj"):
        return lambda x: mlp(x[None])[0]
    gate_up = make_product((mlp.gate_proj, mlp.up_proj), make_linear, dtype)
    down = make_product((mlp.down_proj,), make_output, dtype)

    def run(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, -1)
        return down(silu(gate).mul_(up))

    return run


def _make_head_norm(
    attention: Any, heads: tuple[int, int], in_pairs: "Reorder"
) -> Callable[[torch.Tensor], object] | None:
    """Returns what normalises the query and key heads of ``[rows, heads, head_dim]`` (float32, of
    query, key and value) in place, before they are rotated; None for layers without such norms."""
    if getattr(attention, "q_norm", None) is None:
        return None
    norms = norm_weight(attention.q_norm), norm_weight(attention.k_norm)
    head_dim, eps = attention.head_dim, norms[0][1]
    weight = torch.cat(
        [
            in_pairs(weight.float()).expand(count, -1)
            for (weight, _), count in zip(norms, heads, strict=True)
        ]
    )

    def normalise(all_heads: torch.Tensor) -> None:
        part = all_heads.narrow(1, 0, weight.shape[0])
        torch.mul(rms_norm(part, (head_dim,), eps=eps), weight, out=part)

    return normalise


Reorder = Callable[[torch.Tensor], torch.Tensor]  # changes the order of a weight's rows


def make_product(
    modules: Sequence[Any],
    make_linear: MakeLinear,
    dtype: torch.dtype,
    reorders: Sequence[Reorder] = (),
) -> Linear:
    """Makes one product of ``modules``, whose results are joined, for rows of ``dtype``;
    ``reorders`` change the order of the results of the first modules. The weights of plain modules
    are copied and emptied, and so are the weights of quantised modules for which
    hippo.models.quantized.packed has kernels; other modules are called."""
    all_reorders = [*reorders, *[_unchanged] * (len(modules) - len(reorders))]
    pairs = list(zip(modules, all_reorders, strict=True))
    if not all(map(is_plain, modules)):
        if (packed := make_packed(modules, dtype, reorders)) is not None:
            return packed
        if len(modules) == 1:
            return modules[0]  # type: ignore[no-any-return]
        return lambda x: torch.cat([reorder(each(x).T).T for each, reorder in pairs], -1)
    weights = [reorder(each.weight) for each, reorder in pairs]
    biases = [reorder(each.bias) for each, reorder in pairs if each.bias is not None]
    assert len(biases) in (0, len(modules)), "some parts have a bias and some have none"
    product = make_linear(
        torch.cat(weights) if len(weights) > 1 else weights[0],
        torch.cat(biases) if biases else None,
    )
    _empty_weights(modules)
    return product


def _unchanged(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _empty_weights(modules: Sequence[Any]) -> None:
    for module in modules:
        module.weight.data = module.weight.data.new_empty(0)
    if modules[0].weight.is_cuda:
        # The joined weight of the next layer is too large for the blocks that are free now: without
        # this they would add up, on an H200 to 30 GB for a model of 67 GB.
        torch.cuda.empty_cache()


def _adjacent_pairs(rows: torch.Tensor, head_dim: int, num_rotated: int) -> torch.Tensor:
    """Reorders rows of a projection (or its bias) so that rotary pairs are adjacent."""
    by_head = rows.reshape(-1, head_dim, *rows.shape[1:])
    pairs = by_head[:, :num_rotated].reshape(-1, 2, num_rotated // 2, *rows.shape[1:])
    rotated = pairs.transpose(1, 2).flatten(1, 2)
    return torch.cat((rotated, by_head[:, num_rotated:]), 1).reshape(rows.shape)


def _gates_last(rows: torch.Tensor, head_dim: int, in_pairs: Reorder) -> torch.Tensor:
    """Reorders rows of a query projection, of queries and gates in turn, so that the gates of all
    heads follow the queries, whose rotary pairs are adjacent."""
    queries, gates = rows.reshape(-1, 2, head_dim, *rows.shape[1:]).unbind(1)
    return torch.cat((in_pairs(queries.flatten(0, 1)), gates.flatten(0, 1)))
