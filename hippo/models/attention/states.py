"""The states of layers that have one in place of keys and values: kept, logged and rolled back.

A state is that of one place, behind all rows before it. A slot keeps few of them, and the inputs
of its last rows, from which the states between are computed again:

    rows    |- video -|- question -|- completion ....... r r r r r r|
    states            ^ kept       ^ kept          base ^           ^ end
    log                                                 |-----------|

No step goes back before the base, so a rollback costs the computation of the rows from the base to
its place. The base moves on with the rows that are settled. Each layer counts for itself, because a
prefill runs some layers before others, and a failed forward leaves the last ones behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hippo.catalog.states import LOG_ROWS, NUM_STATES, StateShape
from hippo.errors import HippoError
from hippo.models.attention.zeros import zeros


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of one sequence in a forward, at cache indices from ``start`` on.

    No later step of the sequence begins before ``least_start``. A prompt's rows keep the states of
    ``marks`` (cache indices), as far as they reach; ``is_first`` says that they begin the prefill.
    """

    slot: int
    first_row: int
    num_rows: int
    start: int
    least_start: int = 0
    marks: tuple[int, ...] | None = None  # None: a step
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """The state of one place in one layer."""

    matrix: torch.Tensor  # float32 [num_heads, key_dim, value_dim]
    inputs: torch.Tensor  # [num_inputs, input_width]: of the last rows before the place


def zero_state(shape: StateShape, dtype: torch.dtype, device: torch.device) -> State:
    """Returns the state before the first row."""
    state = (shape.num_heads, shape.key_dim, shape.value_dim)
    inputs = (shape.num_inputs, shape.input_width)
    return State(torch.zeros(state, device=device), torch.zeros(inputs, dtype=dtype, device=device))


@dataclass(slots=True)
class _Slot:
    base: int = 0
    end: int = 0
    first: int = 0  # where the prefill began, until a step follows
    marks: tuple[int, ...] = ()
    buffers: dict[int, int] = field(default_factory=dict)  # of the kept states, by place


class LayerStates:
    """The states and the log of one layer, for all slots. The state of place 0 is zero."""

    def __init__(
        self,
        shape: StateShape,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        zero: State,
    ) -> None:
        """``zero`` is a zero_state, which all layers share."""
        state = (shape.num_heads, shape.key_dim, shape.value_dim)
        inputs = (shape.num_inputs, shape.input_width)
        kept = (num_slots, NUM_STATES)
        self._matrices = zeros((*kept, *state), torch.float32, device)
        self._inputs = zeros((*kept, *inputs), dtype, device)
        self._log = zeros((num_slots, LOG_ROWS, shape.log_width), dtype, device)
        self._zero = zero
        self._slots = [_Slot() for _ in range(num_slots)]

    def reaches(self, slot: int, place: int) -> bool:
        """Whether there is a state for ``place``, or one can be computed again."""
        own = self._slots[slot]
        return place == 0 or place in own.buffers or own.base <= place <= own.end

    def nearest(self, slot: int, place: int) -> tuple[State, torch.Tensor]:
        """Returns the last state up to ``place`` from which the log goes on to it, and the log's
        rows between; raises HippoError if there is none."""
        own = self._slots[slot]
        if place == 0 or place in own.buffers:
            return self._at(slot, place), self._log[slot, :0]
        if not own.base <= place <= own.end:
            raise HippoError(
                f"a step goes back to row {place}, but the states are kept from row {own.base} on: "
                f"no more than {LOG_ROWS} tokens may be drafted ahead (--max-draft-tokens)"
            )
        first = max(each for each in (0, *own.buffers) if own.base <= each < place)
        return self._at(slot, first), self._logged(slot, first, place)

    def begin_prompt(self, slot: int, place: int, state: State, marks: Sequence[int]) -> None:
        """Begins a prefill behind the first ``place`` rows, and forgets what is behind them."""
        self._slots[slot].first, self._slots[slot].marks = place, tuple(marks)
        self.pass_prompt(slot, place, state)

    def pass_prompt(self, slot: int, place: int, state: State) -> None:
        """Takes the state behind further rows of a prompt, which are not logged."""
        own = self._slots[slot]
        own.base = own.end = place
        self._keep(slot, place, state)

    def settle(self, slot: int, place: int, state: State) -> None:
        """Moves the base on to ``place``, where the next step or a later one begins."""
        own = self._slots[slot]
        own.base = own.first = place
        self._keep(slot, place, state)

    def room(self, slot: int, place: int) -> int:
        """Returns how many rows from ``place`` on the log has room for."""
        return self._slots[slot].base + LOG_ROWS - place

    def base(self, slot: int) -> int:
        """Returns the place before which steps cannot go back."""
        return self._slots[slot].base

    def append(self, slot: int, place: int, rows: torch.Tensor, state: State) -> None:
        """Logs the inputs of a step's rows from ``place`` on, and keeps the state behind them."""
        own = self._slots[slot]
        own.end, own.first = place, own.base
        self._forget(own)
        first = place % LOG_ROWS
        split = min(rows.shape[0], LOG_ROWS - first)
        self._log[slot, first : first + split] = rows[:split]
        self._log[slot, : rows.shape[0] - split] = rows[split:]
        own.end = place + rows.shape[0]
        self._keep(slot, own.end, state)

    def copy(self, source: int, slot: int, place: int, state: State) -> None:
        """Gives ``slot`` the state at ``place`` of ``source``, and its kept ones before that."""
        theirs = self._slots[source]
        marks = [each for each in theirs.marks if each < place and each in theirs.buffers]
        self._slots[slot] = _Slot(base=place, end=place, first=place, marks=tuple(marks))
        for each in marks:
            self._keep(slot, each, self._at(source, each))
        self._keep(slot, place, state)

    def _at(self, slot: int, place: int) -> State:
        buffer = self._slots[slot].buffers.get(place)
        if buffer is None:
            return self._zero
        return State(self._matrices[slot, buffer], self._inputs[slot, buffer])

    def _logged(self, slot: int, first: int, end: int) -> torch.Tensor:
        start = first % LOG_ROWS
        stop = start + end - first
        rows = self._log[slot, start : min(stop, LOG_ROWS)]
        if stop <= LOG_ROWS:
            return rows
        return torch.cat((rows, self._log[slot, : stop - LOG_ROWS]))

    def _keep(self, slot: int, place: int, state: State) -> None:
        own = self._slots[slot]
        self._forget(own)
        if place and place not in own.buffers:
            buffer = min(set(range(NUM_STATES)) - set(own.buffers.values()))
            self._matrices[slot, buffer] = state.matrix
            self._inputs[slot, buffer] = state.inputs
            own.buffers[place] = buffer

    def _forget(self, own: _Slot) -> None:
        """Drops the states that nothing needs, and those behind the end."""
        needed = {own.first, own.base, own.end, *own.marks}
        own.buffers = {
            place: buffer
            for place, buffer in own.buffers.items()
            if place in needed and place <= own.end
        }
