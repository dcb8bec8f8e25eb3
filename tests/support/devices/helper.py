"""A prefill helper in a thread of this process."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from hippo.base.worker_process import shared_file
from hippo.models.interface.base import AttentionTap, PrefillHelp, Prompt, VideoLanguageModel
from hippo.models.interface.plan import LoadPlan
from hippo.models.load import load_parts
from hippo.parallel.commands import Stop
from hippo.parallel.help import Told
from hippo.parallel.help_memory import HelpMemory, layer_shape
from hippo.parallel.helped import HelpedModel
from hippo.parallel.helper import PrefillHelper
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


class Helper:
    """A prefill helper's thread. It ends the link, as if it had ended, when ``num_left`` news have
    been told; None: never."""

    def __init__(self, link: HelperLink) -> None:
        self._link = link
        self.num_left: int | None = None

    def tell(self, news: Told) -> None:
        if self.num_left is None or self.num_left > 0:
            self._link.add_news(news)
            self.num_left = None if self.num_left is None else self.num_left - 1
        else:
            self._link.lose()


@contextmanager
def helped_model(
    folder: Path, num_layers: int, **changes: Any
) -> Iterator[tuple[HelpedModel, Helper]]:
    """A model in float32 with three slots of 512 tokens whose first layers a helper has."""
    options: dict[str, Any] = {"dtype": "float32", "num_slots": 3, "max_context_length": 512}
    plan = LoadPlan(str(folder), **(options | changes))
    loaded, family = load_parts(plan)
    first, _ = load_parts(LoadPlan(str(folder), **(options | changes), first_layers=num_layers))
    file, num_rows = shared_file(0), loaded.cache.shape.capacity
    memories = [
        HelpMemory(layer_shape(first), num_rows, file, loaded.cache.device) for _ in range(2)
    ]
    os.close(file)
    link = HelperLink(memories[0], num_layers)
    theirs, commands = Pipe(duplex=False)
    link.use(commands.send)
    helper = Helper(link)
    thread = threading.Thread(target=PrefillHelper(first, memories[1], theirs, helper.tell).serve)
    thread.start()
    model = HelpedModel(loaded, family)
    model.helper = link
    try:
        yield model, helper
    finally:
        commands.send(Stop())
        thread.join()
