"""The prefill helper: a process on the draft's device that runs the first layers of the target's
prompts, chunk by chunk, while the target runs the other layers.

It keeps no prompt: its only slot is written anew by each.
"""

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from hippo.catalog.sizes import LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS
from hippo.models.attention.parts import AttentionPlan, QueryTap, plan_chunks
from hippo.models.interface.transfer import to_device
from hippo.models.loading.pretrained import Pretrained
from hippo.parallel.commands import Stop
from hippo.parallel.help import HelpWith, Step, Told
from hippo.parallel.help_memory import HelpMemory

_SLOT = 0


class PrefillHelper:
    """The first layers of a model, and the memory that the process with all layers shares."""

    def __init__(
        self,
        loaded: Pretrained,
        memory: HelpMemory,
        commands: Connection,
        tell: Callable[[Told], None],
    ) -> None:
        self._stack, self._cache = loaded.stack, loaded.cache
        self._stack.drop_head()
        self.device = loaded.cache.device
        self._has_flash = loaded.eager.has_flash
        self._memory, self._commands, self._tell = memory, commands, tell
        self._num_layers = loaded.cache.shape.num_layers
        self._width, self._half = loaded.shape.hidden_size, loaded.cache.shape.head_dim // 2
        self._dtype = loaded.model.get_input_embeddings().weight.dtype
        self._num_fed = self._num_free = 0  # parts that are there, places for chunks
        self._is_stopped = False

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs chunks of the least and of the most rows, so that no prompt waits for first uses."""
        for num_rows in (LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS):
            num_rows = min(num_rows, self._cache.shape.capacity)
            [(_, step)] = self._chunks(0, num_rows, num_rows)
            hidden = torch.zeros(num_rows, self._width, dtype=self._dtype, device=self.device)
            rotary = torch.ones(num_rows, 1, self._half, device=self.device) + 0j
            self._stack.run(hidden, rotary, step, 0, self._num_layers)

    def serve(self) -> None:
        """Helps with prompts until Stop."""
        while not self._is_stopped:
            command = self._commands.recv()
            self._is_stopped = isinstance(command, Stop)
            if isinstance(command, HelpWith):
                self._help(command)
                self._tell(Told(command.number, Step.OVER))

    @torch.inference_mode()
    def _help(self, command: HelpWith) -> None:
        """Runs a prompt, as far as it is wanted."""
        self._cache.forget_slot(_SLOT)
        self._num_fed, self._num_free = 0, self._memory.num_chunks
        reused = command.num_reused
        steps = self._chunks(0, reused, reused) if reused else []
        steps += self._chunks(reused, command.num_rows - reused, command.chunk_rows)
        for index, (first, end) in enumerate(command.parts()):
            if not self._is_wanted(command, index):
                return
            _, step = steps[index]
            if first < reused:
                self._run(command, first, end, step)
            else:
                self._give(command, (first - reused) // command.chunk_rows, step)

    def _is_wanted(self, command: HelpWith, index: int) -> bool:
        """Waits for part ``index`` and for a place for a chunk; returns False if the prompt is
        abandoned."""
        while self._num_fed <= index or not self._num_free or self._commands.poll():
            news = self._commands.recv()
            self._is_stopped = isinstance(news, Stop)
            if self._is_stopped or news == Told(command.number, Step.ABANDONED):
                return False
            self._num_fed += news == Told(command.number, Step.FED)
            self._num_free += news == Told(command.number, Step.TAKEN)
        return True

    def _give(self, command: HelpWith, index: int, step: AttentionPlan) -> None:
        """Computes the chunk ``index``, and tells that it is ready."""
        (first, end), tapped = command.bounds()[index], command.tapped[index]
        chunk = self._memory.chunk(index, end - first, command.num_tapped, len(tapped))
        queries: dict[int, list[torch.Tensor]] = {}
        if len(chunk.queries) and tapped:
            rows = to_device(torch.tensor(tapped), self.device)
            step = replace(step, tap=QueryTap(rows, queries))
        hidden = self._run(command, first, end, step)
        chunk.hidden.copy_(hidden, non_blocking=True)
        own = self._cache.first_layers(self._num_layers, _SLOT, first, end)
        chunk.cached.copy_(own, non_blocking=True)
        for layer, place in enumerate(chunk.queries[: len(queries)]):
            place.copy_(queries[layer][0], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._num_free -= 1
        self._tell(Told(command.number, Step.READY))

    def _run(self, command: HelpWith, first: int, end: int, step: AttentionPlan) -> torch.Tensor:
        given = self._memory.inputs(first, end, command.num_added)
        hidden, rotary = to_device(given.hidden, self.device), to_device(given.rotary, self.device)
        for layer, features in enumerate(given.added):
            hidden = self._stack.run(hidden, rotary, step, layer, layer + 1)
            hidden += to_device(features, self.device)
        return self._stack.run(hidden, rotary, step, command.num_added, self._num_layers)

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
