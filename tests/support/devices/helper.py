"""A prefill helper in a thread of this process, and a link to it through memory."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch

from hippo.models.interface.base import AttentionTap, PrefillHelp, Prompt, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_parts
from hippo.parallel.commands import Stop
from hippo.parallel.helped import HelpedModel
from hippo.parallel.helper import PrefillHelper, layer_shape
from hippo.parallel.helper_link import HelperLink


def begin_help(
    model: VideoLanguageModel,
    slot: int,
    prompt: Prompt,
    tap: AttentionTap | None = None,
    num_reused: int = 0,
) -> PrefillHelp:
    """A prefill with help, which has got its features."""
    help = model.begin_help(slot, prompt, tap, num_reused)
    assert help is not None
    for rows in model.embed_pieces(prompt):
        help.add_features(rows)
    return help


class MemoryLink:
    """One end of a link within a process; ``before_send`` is called before each transfer."""

    device = torch.device("cpu")

    def __init__(self, outgoing: queue.SimpleQueue[Any], incoming: queue.SimpleQueue[Any]) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self.before_send: Callable[[], None] = lambda: None

    def send(self, tensor: torch.Tensor) -> "MemoryLink":
        self.before_send()
        assert tensor.is_contiguous()
        self._outgoing.put(tensor.clone())
        return self

    def wait(self) -> None:
        """A sent tensor is copied at once."""

    def receive(self, tensor: torch.Tensor) -> None:
        sent = self._incoming.get()
        if isinstance(sent, Exception):
            raise sent
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(sent)

    def close(self) -> None:
        pass


@contextmanager
def helped_model(
    folder: Path, num_layers: int, **changes: Any
) -> Iterator[tuple[HelpedModel, MemoryLink]]:
    """A model in float32 with three slots of 512 tokens whose first layers a helper has, and the
    helper's end of the link."""
    options: dict[str, Any] = {"dtype": "float32", "num_slots": 3, "max_context_length": 512}
    plan = LoadPlan(str(folder), **(options | changes))
    loaded, family = load_parts(plan)
    first, _ = load_parts(LoadPlan(str(folder), **(options | changes), first_layers=num_layers))
    to_helper: queue.SimpleQueue[Any] = queue.SimpleQueue()
    to_model: queue.SimpleQueue[Any] = queue.SimpleQueue()
    theirs, commands = Pipe(duplex=False)
    link: Any = MemoryLink(to_helper, to_model)
    helpers: Any = MemoryLink(to_model, to_helper)
    helper = PrefillHelper(first, helpers, theirs)
    thread = threading.Thread(target=helper.serve)
    thread.start()
    model = HelpedModel(loaded, family)
    with patch("hippo.parallel.helper_link._NUM_BUFFERS", 64):  # the helper never waits for one
        model.helper = HelperLink(link, layer_shape(first), commands.send, Mock())
    try:
        yield model, helpers
    finally:
        commands.send(Stop())
        thread.join()
        model.helper.close()
