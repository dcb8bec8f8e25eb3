"""Decoder layers of gated delta nets (Qwen3.5): a state of fixed size in place of keys and values.

A prompt's rows run by the chunk rule, in every mode alike, and a step's rows by the recurrent rule,
row after row. So a row has the same bits in a block, alone, and when it is computed again from the
log after a rollback (hippo.models.attention.states).
"""

from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from hippo.models.attention.parts import AttentionPlan
from hippo.models.attention.states import LayerStates, State, StateRows
from hippo.models.products.kernels import make_norm
from hippo.models.products.linear import MakeLinear
from hippo.models.runners.delta_rule import DeltaRule
from hippo.models.runners.layers import make_mlp, make_product


class DeltaLayer:
    """One layer with a gated delta net and an MLP, from transformers' module."""

    def __init__(self, layer: Any, make_linear: MakeLinear, make_output: MakeLinear) -> None:
        mixer, dtype = layer.linear_attn, layer.input_layernorm.weight.dtype
        self._input_norm = make_norm(layer.input_layernorm)
        self._post_norm = make_norm(layer.post_attention_layernorm)
        inputs, gates = mixer.in_proj_qkv, mixer.in_proj_z
        self._inputs = make_product((inputs, gates), make_linear, dtype)
        self._rates = make_product((mixer.in_proj_b, mixer.in_proj_a), make_linear, dtype)
        self._rule = DeltaRule(mixer)
        self._read_norm = mixer.norm.weight.float(), mixer.norm.variance_epsilon
        self._output = make_product((mixer.out_proj,), make_output, dtype)
        self._mlp = make_mlp(layer.mlp, make_linear, make_output, dtype)

    def __call__(
        self, hidden: torch.Tensor, _rotary: torch.Tensor, step: AttentionPlan, index: int
    ) -> torch.Tensor:
        mixed = self._mix(hidden, step, step.states[index])
        hidden = mixed.add_(hidden[-mixed.shape[0] :])  # all rows, or the last one
        return self._mlp(self._post_norm(hidden)).add_(hidden)

    def copy_state(self, states: LayerStates, source: int, slot: int, place: int) -> None:
        """See DecoderStack.copy_states."""
        states.copy(source, slot, place, self._state_at(states, source, place))

    def _mix(self, hidden: torch.Tensor, step: AttentionPlan, states: LayerStates) -> torch.Tensor:
        """Returns what the net adds to ``hidden``, or to its last row."""
        x = self._input_norm(hidden)
        width = self._rule.input_width
        inputs_and_gates = self._inputs(x)
        inputs, gates = inputs_and_gates[:, :width], inputs_and_gates[:, width:]
        inputs = torch.cat((inputs, self._rates(x)), 1)
        read = [
            self._run(inputs[rows.first_row : rows.first_row + rows.num_rows], rows, states)
            for rows in step.state_rows
        ]
        if num_padding := inputs.shape[0] - sum(rows.num_rows for rows in step.state_rows):
            read.append(read[0].new_zeros(num_padding, *read[0].shape[1:]))
        found = read[0] if len(read) == 1 else torch.cat(read)  # [rows, num_heads, value_dim]
        if step.wants_last_row:
            found, gates = found[-1:], gates[-1:]
        weight, eps = self._read_norm
        normed = rms_norm(found.float(), weight.shape, weight, eps).flatten(1)
        return self._output(normed.mul_(silu(gates.float())).to(hidden.dtype))

    def _run(self, inputs: torch.Tensor, rows: StateRows, states: LayerStates) -> torch.Tensor:
        """Reads with one sequence's rows, and takes their states."""
        state = self._state_at(states, rows.slot, rows.start)
        if rows.marks is None:
            return self._run_step(inputs, rows, states, state)
        if rows.is_first:
            states.begin_prompt(rows.slot, rows.start, state, rows.marks)
        outputs, place, end = [], rows.start, rows.start + rows.num_rows
        for stop in sorted({end, *(mark for mark in rows.marks if place < mark < end)}):
            part = inputs[place - rows.start : stop - rows.start]
            read, state = self._rule.run_chunks(part, state)
            states.pass_prompt(rows.slot, stop, state)
            outputs.append(read)
            place = stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run_step(
        self, inputs: torch.Tensor, rows: StateRows, states: LayerStates, state: State
    ) -> torch.Tensor:
        """Runs the rows one after the other; the base of the slot's states moves on as far as it
        may, or further if the log is full."""
        slot, place, least = rows.slot, rows.start, rows.least_start
        if place <= least:
            states.settle(slot, place, state)
        elif states.room(slot, place) < rows.num_rows and states.base(slot) < least:
            states.settle(slot, least, self._state_at(states, slot, least))
        outputs = []
        while inputs.shape[0]:
            if states.room(slot, place) <= 0:
                states.settle(slot, place, state)
            part = inputs[: states.room(slot, place)]
            read, state = self._rule.run_rows(part, state)
            states.append(slot, place, part, state)
            outputs.append(read)
            place, inputs = place + part.shape[0], inputs[part.shape[0] :]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _state_at(self, states: LayerStates, slot: int, place: int) -> State:
        """Returns the state at ``place``, computed again from the log if it is not kept."""
        state, logged = states.nearest(slot, place)
        return self._rule.run_rows(logged, state)[1] if logged.shape[0] else state
