"""The model's end of its link to a prefill helper."""

import contextlib
import itertools
import queue
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from hippo.errors import UnavailableError
from hippo.parallel.commands import Command
from hippo.parallel.help import HelpWith, Step, Told
from hippo.parallel.help_memory import Chunk, HelpMemory, Inputs

SendCommand = Callable[[Command], None]


@dataclass(slots=True, eq=False)
class Help:
    """A prompt that the helper runs."""

    command: HelpWith
    num_fed: int = 0  # parts
    num_taken: int = 0  # chunks
    # True for each chunk that has come, and False when nothing more can come.
    ready: "queue.SimpleQueue[bool]" = field(default_factory=queue.SimpleQueue)
    is_over: bool = False  # the helper is done with it
    is_cut: bool = False  # the helper has ended
    is_left: bool = False  # the model needs nothing more


class HelperLink:
    """The model's end of the link, over all processes of the helper, of which one follows the
    other. The device thread calls it, except for ``use``, ``add_news`` and ``lose``."""

    def __init__(self, memory: HelpMemory, num_layers: int) -> None:
        self.num_layers = num_layers
        self.is_lost = True  # there is no process
        self._memory = memory
        self._send_command: SendCommand | None = None
        self._current: Help | None = None
        self._numbers = itertools.count()
        # Commands about copies that a GPU has not yet made; the device thread does not wait.
        self._pending: deque[tuple[torch.cuda.Event, Command]] = deque()

    @property
    def is_free(self) -> bool:
        """Whether the helper can begin with a prompt."""
        self.send_pending()
        if (help_ := self._current) is not None and help_.is_left:
            if help_.is_over or help_.is_cut:
                self._current = None
        return self._current is None and not self._pending and not self.is_lost

    def use(self, send_command: SendCommand) -> None:
        """Uses a helper's process; ``send_command`` raises UnavailableError if it has ended."""
        self._send_command = send_command
        self.is_lost = False

    def begin(self, command: HelpWith) -> Help:
        """Begins with a prompt, whose parts ``feeding`` then gives."""
        help_ = self._current = Help(command)
        self._send(command)
        if self.is_lost:  # since it was free
            help_.is_cut = True
            help_.ready.put(False)
        return help_

    @contextlib.contextmanager
    def feeding(self, help_: Help) -> Iterator[Inputs]:
        """Yields the place of the inputs of the prompt's next part, to be copied there."""
        command = help_.command
        first, end = command.parts()[help_.num_fed]
        help_.num_fed += 1
        yield self._memory.inputs(first, end, command.num_added)
        self._send_after_copies(Told(command.number, Step.FED))

    def take(self, help_: Help, timeout_s: float) -> Chunk | None:
        """Returns the next chunk, to be given back, or None if none has come within the time or
        none will come."""
        self.send_pending()
        try:
            is_ready = help_.ready.get(timeout=timeout_s) if timeout_s else help_.ready.get_nowait()
        except queue.Empty:
            return None
        if not is_ready:
            return None
        command, index = help_.command, help_.num_taken
        help_.num_taken += 1
        first, end = command.bounds()[index]
        return self._memory.chunk(
            index, end - first, command.num_tapped, len(command.tapped[index])
        )

    def give_back(self, help_: Help) -> None:
        """Frees the place of the chunk that was taken last, of which copies have begun."""
        self._send_after_copies(Told(help_.command.number, Step.TAKEN))

    def leave(self, help_: Help) -> None:
        """Expects nothing more of a prompt; the helper is free when it knows."""
        help_.is_left = True
        if not help_.is_over:
            self._send(Told(help_.command.number, Step.ABANDONED))

    def next_number(self) -> int:
        """Returns a prompt's number."""
        return next(self._numbers)

    def add_news(self, news: Told) -> None:
        """Receives what the helper tells."""
        help_ = self._current
        if help_ is None or news.number != help_.command.number:
            return
        if news.step is Step.READY:
            help_.ready.put(True)
        else:
            help_.is_over = True

    def lose(self) -> None:
        """Ends the use of the helper, which has ended; what has come stays."""
        self.is_lost, self._send_command = True, None
        if (help_ := self._current) is not None:
            help_.is_cut = True
            help_.ready.put(False)

    def _send_after_copies(self, command: Command) -> None:
        if (device := self._memory.device).type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._pending.append((event, command))
            self.send_pending()
        else:
            self._send(command)

    def send_pending(self) -> None:
        """Tells of the copies that a GPU has made since."""
        while self._pending and self._pending[0][0].query():  # type: ignore[no-untyped-call]
            self._send(self._pending.popleft()[1])

    def _send(self, command: Command) -> None:
        send = self._send_command
        if send is not None:
            with contextlib.suppress(UnavailableError):  # ``lose`` is called soon
                send(command)
