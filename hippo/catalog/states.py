"""The size of the recurrent states that a sequence has; standard library only."""

from dataclasses import dataclass

KEPT_STATES = 2
"""States of a prompt that a slot keeps: behind its last media, and behind its question. A later
prompt with the same beginning goes on from them."""

NUM_STATES = KEPT_STATES + 2
"""States of a slot with the one behind its last row, and one before which no step goes back."""

LOG_ROWS = 256
"""Rows of a slot whose inputs are logged, so that a rollback can compute a state again. A draft
goes about 140 rows beyond the settled tokens under the gateway's default of --max-draft-tokens."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """The dimensions of the states of all layers that have one."""

    num_layers: int
    num_heads: int
    key_dim: int  # of a head; its state is [key_dim, value_dim], in float32
    value_dim: int
    input_width: int  # of a row that enters the short convolution
    num_inputs: int  # rows before the present one that the convolution sees

    @property
    def log_width(self) -> int:
        """Numbers of a logged row: its input, and a decay and a rate for each head."""
        return self.input_width + 2 * self.num_heads

    def num_bytes(self, bytes_each: int) -> int:
        """Returns the bytes of a slot's states and log; inputs have ``bytes_each`` bytes."""
        state = 4 * self.num_heads * self.key_dim * self.value_dim
        inputs = (NUM_STATES * self.num_inputs * self.input_width) * bytes_each
        log = LOG_ROWS * self.log_width * bytes_each
        return self.num_layers * (NUM_STATES * state + inputs + log)

    def work_bytes(self, num_rows: int) -> int:
        """Returns the bytes of activations while a prompt's rows run: about twelve copies of
        queries, keys or values of all heads, in float32."""
        return 48 * num_rows * self.num_heads * max(self.key_dim, self.value_dim)
