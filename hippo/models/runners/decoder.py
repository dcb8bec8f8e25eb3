"""Decoder layers of Qwen2 and Qwen3 with fewer, larger operations than transformers' modules.

One product computes query, key and value, another computes gate and up, and the rotary embedding is
a complex multiplication in place. Results equal transformers' up to rounding. The weights
come from the loaded modules, which say what a layer has: its head size, norms of queries and keys,
biases, an MLP or experts. Modules that a quantiser made are fused where
hippo.models.quantized.packed has kernels for them; elsewhere each is called as it is.

    rotate_half pairs dimension i with i + d/2. Here the rows of the query and key weights are
    reordered so that the two are adjacent, which does not change any query-key product:

        transformers   a0 a1 a2 a3 | b0 b1 b2 b3        here   a0 b0 a1 b1 a2 b2 a3 b3
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import rms_norm, silu

from hippo.models.attention.parts import AttentionPlan, attend
from hippo.models.products.kernels import make_norm
from hippo.models.products.linear import Linear, MakeLinear, aligned_rows, is_plain
from hippo.models.quantized.packed import make_packed

if TYPE_CHECKING:
    from hippo.models.products.shards import Shards


class DecoderStack:
    """The decoder layers of one text model, with rotary embedding, final norm and head.

    The constructor empties the model's own projections after copying their weights, so that memory
    holds the weights once. With ``shards`` the layers hold this rank's part of the weights.
    ``groups`` is the number of query heads that share a key-value head; ``scaling`` is the factor
    of query-key products in attention.
    """

    def __init__(
        self,
        text_model: Any,
        head: Any,
        num_token_ids: int,
        make_linear: MakeLinear,
        shards: "Shards | None" = None,
    ) -> None:
        config = text_model.config
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        self.scaling: float = text_model.layers[0].self_attn.scaling
        self._rotary_module = text_model.rotary_emb
        size = 1 if shards is None else shards.group.size
        heads = config.num_attention_heads // size, config.num_key_value_heads // size
        make_output = make_linear if shards is None else shards.summed(make_linear)
        make_head = make_linear if shards is None else shards.gathered(make_linear)
        with torch.inference_mode():
            self._layers = [
                _FusedLayer(layer, heads, make_linear, make_output) for layer in text_model.layers
            ]
            self._norm = make_norm(text_model.norm)
            self._head: Linear = head
            if is_plain(head):
                self._head = make_head(head.weight[: aligned_rows(num_token_ids)])
        self.num_token_ids = num_token_ids

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def rotary(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns unit complex numbers ``[rows, 1, head_dim / 2]`` of ``positions`` (int64
        ``[num_axes, rows]``), by the model's own rotary module, which combines the axes."""
        reference = torch.empty(0, dtype=torch.float32, device=positions.device)
        batched = positions if positions.shape[0] == 1 else positions[:, None]
        cosines, sines = self._rotary_module(reference, batched)
        half = cosines.shape[-1] // 2  # the two halves are equal
        return torch.complex(cosines[0, :, None, :half], sines[0, :, None, :half])

    def run(
        self,
        hidden: torch.Tensor,
        rotary: torch.Tensor,
        step: AttentionPlan,
        first_layer: int,
        last_layer: int,
    ) -> torch.Tensor:
        """Runs layers ``first_layer:last_layer`` on ``hidden`` ``[rows, hidden_size]``. The result
        has the same shape, or is the last row only if ``step.wants_last_row``, which is allowed for
        a single layer. ``rotary`` holds the rotary factors of the rows."""
        for index in range(first_layer, last_layer):
            hidden = self._layers[index](hidden, rotary, step, index)
        return hidden

    def drop_head(self) -> None:
        """Frees norm and head; ``logits`` cannot be called any more."""
        del self._norm, self._head

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies final norm and head: float32 ``[rows, num_token_ids]``."""
        return self._head(self._norm(hidden))[:, : self.num_token_ids].float()


class _FusedLayer:
    def __init__(
        self,
        layer: Any,
        heads: tuple[int, int],
        make_linear: MakeLinear,
        make_output: MakeLinear,
    ) -> None:
        """``heads`` are the numbers of query heads and of key-value heads in ``layer``."""
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
        in_pairs = partial(_adjacent_pairs, head_dim=head_dim)
        self._qkv = _make_product(projections, make_linear, dtype, (in_pairs, in_pairs))
        self._head_norm = _make_head_norm(attention, heads)
        self._output = _make_product((attention.o_proj,), make_output, dtype)
        self._mlp = _make_mlp(mlp, make_linear, make_output, dtype)

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
        qkv = self._qkv(self._input_norm(hidden)).to(torch.float32)
        if self._head_norm is not None:
            self._head_norm(qkv.view(self._head_shape))
        pairs = torch.view_as_complex(qkv.view(self._pair_shape))
        pairs.narrow(1, 0, self._num_heads + self._num_kv_heads).mul_(rotary)
        heads = qkv.to(step.dtype).view(self._head_shape)
        attended = attend(
            heads.narrow(1, 0, self._num_heads).view(self._query_shape),
            heads.narrow(1, self._num_heads, 2 * self._num_kv_heads).view(self._key_value_shape),
            step,
            index,
            self._scaling,
        )
        return self._output(attended.to(hidden.dtype))


def _make_mlp(
    mlp: Any, make_linear: MakeLinear, make_output: MakeLinear, dtype: torch.dtype
) -> Linear:
    """Makes the layer's MLP; a mixture of experts runs as transformers' own module.

    transformers multiplies all chosen experts by torch's grouped product. In bfloat16 on GPUs from
    Hopper on, the host does not wait in it; elsewhere torch reads the groups' sizes back (ATen's
    GroupedBlas.cpp).
    """
    if not hasattr(mlp, "gate_proj"):
        return lambda x: mlp(x[None])[0]
    gate_up = _make_product((mlp.gate_proj, mlp.up_proj), make_linear, dtype)
    down = _make_product((mlp.down_proj,), make_output, dtype)

    def run(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, -1)
        return down(silu(gate).mul_(up))

    return run


def _make_head_norm(
    attention: Any, heads: tuple[int, int]
) -> Callable[[torch.Tensor], object] | None:
    """Returns what normalises the query and key heads of ``[rows, heads, head_dim]`` (float32, of
    query, key and value) in place, before they are rotated; None for layers without such norms."""
    if getattr(attention, "q_norm", None) is None:
        return None
    norms = attention.q_norm, attention.k_norm
    head_dim, eps = attention.head_dim, attention.q_norm.variance_epsilon
    weight = torch.cat(
        [
            _adjacent_pairs(norm.weight.float(), head_dim).expand(count, -1)
            for norm, count in zip(norms, heads, strict=True)
        ]
    )

    def normalise(all_heads: torch.Tensor) -> None:
        part = all_heads.narrow(1, 0, weight.shape[0])
        torch.mul(rms_norm(part, (head_dim,), eps=eps), weight, out=part)

    return normalise


Reorder = Callable[[torch.Tensor], torch.Tensor]  # changes the order of a weight's rows


def _make_product(
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


def _adjacent_pairs(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders rows of a projection (or its bias) so that rotary pairs are adjacent."""
    pairs = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
