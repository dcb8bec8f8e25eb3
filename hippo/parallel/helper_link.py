"""The model's end of its link to a prefill helper."""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from hippo.errors import HippoError, UnavailableError
from hippo.parallel.commands import Command
from hippo.parallel.help import Abandon, ChunkBuffer, HelpWith, LayerShape
from hippo.parallel.link import Link

_NUM_BUFFERS = 4  # chunks that may lie ready while the model is busy with another piece

SendCommand = Callable[[Command], None]


@dataclass(slots=True, eq=False)
class Help:
    """A prompt that the helper runs: the chunks that have come, and what is still on the way."""

    command: HelpWith
    ready: queue.SimpleQueue[ChunkBuffer | Exception] = field(default_factory=queue.SimpleQueue)
    is_abandoned: bool = False
    # Works and their tensors, which must live until they are sent.
    sending: list[tuple[Any, torch.Tensor]] = field(default_factory=list)


class HelperLink:
    """The model's end of the link. A thread receives; only the device thread calls the rest."""

    def __init__(
        self,
        link: Link,
        shape: LayerShape,
        send_command: SendCommand,
        end_helper: Callable[[HippoError], None],
    ) -> None:
        """``end_helper`` ends the helper's process, which cannot be used any more."""
        self.num_layers = shape.num_layers
        self.is_lost = False
        self._link, self._send_command, self._end_helper = link, send_command, end_helper
        self._current: Help | None = None
        self._lost_help: Help | None = None
        self._numbers = itertools.count()
        self._free: queue.SimpleQueue[ChunkBuffer] = queue.SimpleQueue()
        for _ in range(_NUM_BUFFERS):
            self._free.put(ChunkBuffer(shape, link.device))
        self._begun: queue.SimpleQueue[Help | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._receive_all, name="helper", daemon=True)
        self._thread.start()

    @property
    def is_free(self) -> bool:
        """Whether the helper can begin with a prompt."""
        return self._current is None and not self.is_lost

    def begin(self, command: HelpWith) -> Help | None:
        """Begins with a prompt, whose chunks ``feed`` then sends. Returns None if the helper has
        ended."""
        help_ = Help(command)
        try:
            self._send_command(command)
        except Exception as error:
            self._lose(error)
            return None
        self._current = help_
        self._begun.put(help_)
        return help_

    def feed(self, help_: Help, inputs: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Sends what the helper needs of the next rows; without it the helper cannot go on."""
        try:
            for tensor in inputs():
                there = tensor.to(self._link.device).contiguous()
                help_.sending.append((self._link.send(there), there))
        except Exception as error:
            self._lose(error)
            self._lost_help = help_  # whose tensors may still be on the way

    def take(self, help_: Help, timeout_s: float) -> ChunkBuffer | None:
        """Returns the next chunk, to be given back, or None if none has come within the time or
        none will come."""
        try:
            ready = help_.ready.get(timeout=timeout_s) if timeout_s else help_.ready.get_nowait()
        except queue.Empty:
            return None
        return None if isinstance(ready, Exception) else ready

    def give_back(self, buffer: ChunkBuffer) -> None:
        """Frees a chunk's memory for the next ones."""
        self._free.put(buffer)

    def abandon(self, help_: Help) -> None:
        """Ends a prompt early, all of which has been fed; the helper is free when the rest has
        come."""
        help_.is_abandoned = True
        with contextlib.suppress(Exception):  # it has ended
            self._send_command(Abandon(help_.command.number))
        self._clear(help_)

    def next_number(self) -> int:
        """Returns a prompt's number."""
        return next(self._numbers)

    def close(self) -> None:
        """Ends the thread, after the helper's process has ended or with no prompt on the way."""
        if (current := self._current) is not None:
            self.abandon(current)
        self._begun.put(None)
        self._thread.join()
        self._link.close()

    def _receive_all(self) -> None:
        while (help_ := self._begun.get()) is not None:
            try:
                self._receive(help_)
            except Exception as error:
                self._lose(error)
                help_.ready.put(error)
            self._current = None

    def _lose(self, error: Exception) -> None:
        """Ends the use of the helper; that its process has ended, another thread logs."""
        self.is_lost = True
        self._end_helper(UnavailableError(f"the prefill helper failed: {error}"))

    def _receive(self, help_: Help) -> None:
        command = help_.command
        for (first, end), tapped in zip(command.bounds(), command.tapped, strict=True):
            buffer = self._free.get()
            buffer.fit(end - first, command.num_tapped, len(tapped))
            for tensor in buffer.tensors():
                self._link.receive(tensor)
            help_.ready.put(buffer)
            if help_.is_abandoned:
                self._clear(help_)
        for work, _ in help_.sending:
            work.wait()
        help_.sending.clear()

    def _clear(self, help_: Help) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                buffer = help_.ready.get_nowait()
                if isinstance(buffer, ChunkBuffer):
                    self._free.put(buffer)
