"""The prefill helper: a process on the draft's device that runs the first layers of the target's
prompts, chunk by chunk, while the target runs the other layers.

It keeps no prompt: its only slot is written anew by each.
"""

from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from hippo.catalog.sizes import LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS
from hippo.models.attention.parts import AttentionPlan, QueryTap, plan_chunks
from hippo.models.interface.transfer import to_device
from hippo.models.loading.pretrained import Pretrained
from hippo.parallel.commands import Stop
from hippo.parallel.help import Abandon, ChunkBuffer, HelpWith, InputBuffer, LayerShape
from hippo.parallel.link import Link

_SLOT = 0


def layer_shape(loaded: Pretrained) -> LayerShape:
    """Returns the dimensions of all layers of a loaded model."""
    cache = loaded.cache
    return LayerShape(
        num_layers=cache.shape.num_layers,
        hidden_size=loaded.shape.hidden_size,
        num_heads=loaded.shape.num_heads,
        num_kv_heads=cache.shape.num_kv_heads,
        head_dim=cache.shape.head_dim,
        dtype=loaded.model.get_input_embeddings().weight.dtype,
        cache_dtype=cache.dtype,
    )


class PrefillHelper:
    """The first layers of a model, and the link to the process that has all layers."""

    def __init__(self, loaded: Pretrained, link: Link, commands: Connection) -> None:
        self._stack, self._cache = loaded.stack, loaded.cache
        self._stack.drop_head()
        self.device = loaded.cache.device
        self._has_flash = loaded.eager.has_flash
        self._link, self._commands = link, commands
        self._shape = layer_shape(loaded)
        # Two of each: one is transferred while the other is used.
        self._inputs = [InputBuffer(self._shape, link.device) for _ in range(2)]
        self._outputs = [ChunkBuffer(self._shape, link.device) for _ in range(2)]
        self._sending: list[list[Any]] = [[], []]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs chunks of the least and of the most rows, so that no prompt waits for first uses."""
        for num_rows in (LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS):
            num_rows = min(num_rows, self._cache.shape.capacity)
            [(_, step)] = self._chunks(0, num_rows, num_rows)
            shape, device = self._shape, self._cache.device
            hidden = torch.zeros(num_rows, shape.hidden_size, dtype=shape.dtype, device=device)
            rotary = torch.ones(num_rows, 1, shape.head_dim // 2, device=device) + 0j
            self._stack.run(hidden, rotary, step, 0, shape.num_layers)

    def serve(self) -> None:
        """Helps with prompts until Stop."""
        while not isinstance(command := self._commands.recv(), Stop):
            if isinstance(command, HelpWith) and self._help(command):
                return

    @torch.inference_mode()
    def _help(self, command: HelpWith) -> bool:
        """Runs a prompt; returns whether Stop was received."""
        self._cache.forget_slot(_SLOT)
        is_wanted, reused = True, command.num_reused
        if reused:
            [(_, step)] = self._chunks(0, reused, reused)
            self._run(self._receive(command, 0, reused), step, command)
        steps = self._chunks(reused, command.num_rows - reused, command.chunk_rows)
        for index, (first, end) in enumerate(command.bounds()):
            while self._commands.poll():
                news = self._commands.recv()
                if isinstance(news, Stop):
                    return True
                is_wanted = is_wanted and news != Abandon(command.number)
            given = self._receive(command, index, end - first)
            output, sending = self._outputs[index % 2], self._sending[index % 2]
            while sending:
                sending.pop().wait()
            tapped = command.tapped[index]
            output.fit(end - first, command.num_tapped, len(tapped))
            if is_wanted:
                queries: dict[int, list[torch.Tensor]] = {}
                step = steps[index][1]
                if output.queries is not None:
                    step = _tapped(step, tapped, queries, self._cache.device)
                output.hidden.copy_(self._run(given, step, command))
                own = self._cache.first_layers(self._shape.num_layers, _SLOT, first, end)
                output.cached.copy_(own)
                if output.queries is not None:
                    for layer, place in enumerate(output.queries):
                        place.copy_(queries[layer][0])
            sending += map(self._link.send, output.tensors())
        return False

    def _receive(self, command: HelpWith, index: int, num_rows: int) -> InputBuffer:
        given = self._inputs[index % 2]
        given.fit(num_rows, command.num_added)
        for tensor in given.tensors():
            self._link.receive(tensor)
        return given

    def _run(self, given: InputBuffer, step: AttentionPlan, command: HelpWith) -> torch.Tensor:
        device = self._cache.device
        hidden, rotary = given.hidden.to(device), given.rotary.to(device)
        for layer in range(command.num_added):
            assert given.added is not None
            hidden = self._stack.run(hidden, rotary, step, layer, layer + 1)
            hidden += given.added[layer].to(device)
        return self._stack.run(hidden, rotary, step, command.num_added, self._shape.num_layers)

    def _chunks(
        self, start: int, num_rows: int, chunk_rows: int
    ) -> list[tuple[slice, AttentionPlan]]:
        return plan_chunks(
            self._cache,
            _SLOT,
            start=start,
            num_rows=num_rows,
            chunk_rows=chunk_rows,
            groups=self._stack.groups,
            is_flash=self._has_flash,
        )


def _tapped(
    step: AttentionPlan,
    rows: tuple[int, ...],
    queries: dict[int, list[torch.Tensor]],
    device: torch.device,
) -> AttentionPlan:
    return replace(step, tap=QueryTap(to_device(torch.tensor(rows), device), queries))
