"""How often the host asks the device for values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

_METHODS = ("tolist", "item", "cpu", "__bool__", "__int__")


@dataclass(slots=True)
class Transfers:
    """A count that goes on as long as the context."""

    num: int = 0


@contextmanager
def counted_transfers() -> Iterator[Transfers]:
    """Counts the calls of a tensor's methods that copy values to the host and wait for them."""
    transfers = Transfers()

    def counting(name: str) -> mock._patch[object]:
        original = getattr(torch.Tensor, name)

        def counted(*args: object) -> object:
            transfers.num += 1
            return original(*args)

        return mock.patch.object(torch.Tensor, name, counted)

    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(counting(name))
        yield transfers
