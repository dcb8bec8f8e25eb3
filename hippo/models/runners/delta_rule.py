"""The gated delta rule: for many rows at once, and row after row.

With the inputs of a row, of which a short convolution makes query q, key k and value v of each
head, with its decay g and its rate b, and with the state S ``[key_dim, value_dim]``:

    S = exp(g) S        S = S + k (b (v - k S))        read = q S
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad, silu, softplus

from hippo.models.attention.states import State

_EPS = 1e-6  # of the norms of queries and keys, in transformers and flash-linear-attention
# Columns of the numbers of a head: a CPU's vector and scalar operations round differently, and with
# full vectors a row's numbers do not depend on how many rows there are.
_VECTOR = 32
_GRAIN = 32768  # numbers from which on torch divides them among threads, anywhere

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class DeltaRule:
    """The rule of one layer, with the weights of transformers' module that no product has."""

    def __init__(self, mixer: Any) -> None:
        self.input_width: int = mixer.conv_dim
        self._num_heads: int = mixer.num_v_heads
        self._repeats: int = mixer.num_v_heads // mixer.num_k_heads
        self._widths = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
        self._head_dims = (mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim)
        self._taps = mixer.conv1d.weight[:, 0].t().float().contiguous()  # [num_inputs + 1, width]
        columns = (0, -self._num_heads % _VECTOR)
        self._decay = pad(-mixer.A_log.float().exp(), columns)
        self._bias = pad(mixer.dt_bias.float(), columns)
        weight = mixer.conv1d.weight
        self._dtype = weight.dtype if weight.device.type == "cuda" else torch.float32
        self._chunk_rule, self._row_rule = _rules(weight.device, self._dtype)

    def run_chunks(self, inputs: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Reads with rows ``[rows, log_width]`` behind ``state``: ``[rows, num_heads, value_dim]``
        and the state behind them."""
        return self._run(self._chunk_rule, inputs, state)

    def run_rows(self, inputs: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Does the same row after row."""
        return self._run(self._row_rule, inputs, state)

    def _run(self, rule: Rule, inputs: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        num_rows, width = inputs.shape[0], self.input_width
        seen = torch.cat((state.inputs, inputs[:, :width].to(state.inputs.dtype)))
        rows = seen.float()
        mixed = rows[:num_rows] * self._taps[0]
        for index in range(1, self._taps.shape[0]):
            mixed.addcmul_(rows[index : index + num_rows], self._taps[index])
        for part in mixed.split(max(_GRAIN // width, 1)):
            silu(part, inplace=True)
        mixed = mixed.to(self._dtype)
        parts = torch.split(mixed, self._widths, 1)
        query, key, value = (
            part.view(num_rows, -1, head_dim)
            for part, head_dim in zip(parts, self._head_dims, strict=True)
        )
        if self._repeats > 1:
            query, key = (each.repeat_interleave(self._repeats, 1) for each in (query, key))
        rates = inputs[:, width:].float().view(num_rows, 2, -1)
        rates = pad(rates, (0, -self._num_heads % _VECTOR))
        decay = softplus(rates[:, 1] + self._bias).mul_(self._decay)[:, : self._num_heads]
        rate = rates[:, 0].sigmoid()[:, : self._num_heads]
        read, matrix = rule(
            query[None],
            key[None],
            value[None],
            g=decay[None],
            beta=rate[None],
            initial_state=state.matrix[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return read[0], State(matrix[0], seen[num_rows:])


def _by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    **_options: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule row after row, in float32; shapes as transformers' torch_recurrent_gated_delta_rule.
    Each row's operations have the same shapes, and hence the same bits beside any other rows."""
    query, key = (
        x[0] * torch.rsqrt((x[0] * x[0]).sum(-1, keepdim=True) + _EPS) for x in (query, key)
    )
    query = (query / query.shape[-1] ** 0.5).unsqueeze(-1)
    key, rates, value = key.unsqueeze(-1), beta[0].unsqueeze(-1), value[0]
    state, read = initial_state[0].clone(), torch.empty_like(value)
    for row in range(value.shape[0]):
        state.mul_(g[0, row].exp()[:, None, None])
        change = value[row] - (state * key[row]).sum(1)
        state.addcmul_(key[row], change.mul_(rates[row]).unsqueeze(1))
        torch.sum(state * query[row], 1, out=read[row])
    return read[None], state[None]


def _rules(device: torch.device, dtype: torch.dtype) -> tuple[Rule, Rule]:
    """Returns the rule for chunks and the rule for rows: in 16 bits on a GPU transformers'
    functions, which are flash-linear-attention's kernels where it is installed, and else log that
    they are slow."""
    modeling: Any = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    chunks, rows = modeling.torch_chunk_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule
    if device.type == "cuda" and dtype != torch.float32:
        return chunks, rows
    return inspect.unwrap(chunks), _by_rows
